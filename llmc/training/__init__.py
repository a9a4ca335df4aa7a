"""Training what an engine is given besides its model's weights. The only room where gradients are computed."""
