"""How numbers are stored in fewer bits: codes, caches of codes, and the schemes that ask for them."""
