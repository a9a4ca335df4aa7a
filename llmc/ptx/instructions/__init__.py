"""The instructions of the machine, one file per family."""
