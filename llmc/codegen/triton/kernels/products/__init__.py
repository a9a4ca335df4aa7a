"""Matrix products: of dense weights and of codes, each in several ways for as many numbers of rows."""
