"""One file per route or group of routes."""
