"""The graph that all stages share: capture, verification, rendering, cost and eager execution."""
