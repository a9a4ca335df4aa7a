"""The number of rows in a panel of a packed weight. Separate from the packing code, which needs torch."""

PANEL = 32
