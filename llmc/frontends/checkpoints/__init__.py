"""How the weights of a model directory are stored, and where else weights come from."""
