"""Front ends: each turns a kind of model argument into a captured graph and a source of weights."""
