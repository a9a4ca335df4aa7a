"""Counters that the programs of a launch count themselves with, so that the last one finishes what all have begun.

A step's operand `engine:arrivals` is [MOST_COUNTERS], int32. All launches share it: each finds zeros, and leaves zeros.
"""

from llmc.program.launch_arguments import Operand

ARRIVALS = Operand("engine", "arrivals")
MOST_COUNTERS = 1 << 16
