"""Tool calls in the forms that model families were trained on: read from text piece by piece, written as grammars."""
