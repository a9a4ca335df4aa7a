"""Executors, which compute a step with compiled code or with the graph itself."""
