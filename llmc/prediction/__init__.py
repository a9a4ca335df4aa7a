"""How long launches and steps take, from what they cost and what a machine delivers."""
