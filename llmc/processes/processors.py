"""How many processors this process may use, by its affinity and by the quota of its container."""

import os

from llmc.processes.cgroups import processor_quota


def usable_processors() -> int:
    """Hardware threads of the affinity, as many as the quota keeps running all the time; at least one."""
    return within_quota(len(os.sched_getaffinity(0)))


def within_quota(count: int) -> int:
    """At most as many as a quota keeps running all the time: more would be stopped, and the others wait for them."""
    quota = processor_quota()
    return count if quota is None else max(1, min(count, int(quota)))
