"""How many rows of a packed weight lie side by side. Apart from what packs them, which needs torch."""

PANEL = 32
