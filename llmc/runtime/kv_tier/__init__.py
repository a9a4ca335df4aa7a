"""The second tier: where blocks go that the pools give away, and from where they come back (docs/kv-offloading.md)."""
