"""Several processes, each with an engine, behind one port: routing, health, restarts."""
