"""How the ops of KV compression policies are placed in a graph: one policy a file."""
