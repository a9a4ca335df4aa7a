"""Which part of each weight a rank has."""
