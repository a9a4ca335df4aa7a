"""From a torch module to a graph at stage captured."""
