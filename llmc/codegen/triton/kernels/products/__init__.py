"""Matrix products with dense weights and with codes, each with several kernels for different numbers of rows."""
