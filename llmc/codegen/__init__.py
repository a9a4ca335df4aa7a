"""From an optimized graph to a program: kernels chosen, loops grouped, memory planned, source printed."""
