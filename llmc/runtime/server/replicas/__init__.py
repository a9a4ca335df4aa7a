"""Several processes with an engine each behind one port: routing, health, restarts."""
