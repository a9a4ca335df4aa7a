"""How many processors this process may use, by its affinity and by the quota of its container."""

import os

from llmc.processes.cgroups import processor_quota


def usable_processors() -> int:
    """Number of hardware threads in the affinity mask, limited by the quota; at least one."""
    return within_quota(len(os.sched_getaffinity(0)))


def within_quota(count: int) -> int:
    """Limit `count` to the number of threads that the quota keeps running: further ones would be throttled and delay
    the others."""
    quota = processor_quota()
    return count if quota is None else max(1, min(count, int(quota)))
