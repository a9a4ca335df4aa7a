"""Speed and memory, measured against peers: every figure in the docs is printed by a script here."""
