"""How many snapshots of states the prefix cache gets."""

from llmc.errors import bad_value
from llmc.program import Program, state_bytes

# A conversation needs one of its prompt and one of its answer; others wait while these run.
PER_SEQUENCE = 4
# Snapshots are touched as they are taken, so this is a ceiling, as the KV cache's size is one.
MEMORY_FRACTION = 0.1


def snapshot_count(program: Program, state_cache_bytes: int | None, free: int) -> int:
    """Number of snapshots that fit into state_cache_bytes; by default four per sequence of a step, but at most the
    number that fits into a tenth of the `free` bytes. 0 for a model without states. Raises OptionError."""
    if state_cache_bytes is not None and (type(state_cache_bytes) is not int or state_cache_bytes < 0):
        fix = "give a whole number of bytes, 0 for no snapshots, or None for a share of the free memory"
        raise bad_value("state_cache_bytes", state_cache_bytes, fix)
    per_snapshot = state_bytes(program.states)
    if not per_snapshot:
        return 0
    if state_cache_bytes is not None:
        return state_cache_bytes // per_snapshot
    return min(PER_SEQUENCE * program.limits.max_sequences, int(MEMORY_FRACTION * free) // per_snapshot)
