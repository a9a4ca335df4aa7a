"""How many threads a step uses: one for each physical core that this process may run on all the time."""

import os
from pathlib import Path

from llmc.errors import bad_value
from llmc.processes.processors import within_quota
from llmc.settings import settings

_MAX_THREADS = 1024


def thread_count(requested: int | None) -> int:
    """The requested number, else LLMC_THREADS, else the cores available. Raises OptionError out of 1 to 1024."""
    if requested is None:
        return settings().threads or available_cores()
    if type(requested) is not int or not 1 <= requested <= _MAX_THREADS:
        raise bad_value("threads", requested, f"give a whole number 1 to {_MAX_THREADS}")
    return requested


def available_cores() -> int:
    """Physical cores within the CPU affinity and the container's quota.

    Hardware threads of one core share its vector units and count once.
    """
    processors = os.sched_getaffinity(0)
    return within_quota(len({_core_of(processor) for processor in processors}))


def _core_of(processor: int) -> str:
    """A key shared by a processor's siblings; without topology files each processor is its own core."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return str(processor)
