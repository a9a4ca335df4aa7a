"""`llmc env`: properties of this machine and installation, for bug reports and speed predictions."""

import os
import platform

from rich.text import Text

from llmc.cache.installed_version import installed_version
from llmc.cli.status_line import status_line
from llmc.cli.table import facts, standard_output
from llmc.cli.units import in_bytes, in_rate
from llmc.errors import ToolchainError
from llmc.plural import counted
from llmc.processes.cgroups import memory_limit, processor_quota
from llmc.processes.processors import usable_processors
from llmc.runtime.threads import thread_count
from llmc.settings import settings
from llmc.targets import host_target

PACKAGES = ("llmc-compiler", "torch", "transformers", "safetensors", "tokenizers", "numpy")


def env() -> None:
    """Show versions, the compiler, the CPU and its measured read bandwidth."""
    from llmc.codegen.cpp.probes import read_bandwidth
    from llmc.codegen.cpp.toolchain import find_toolchain

    table = facts("environment")
    table.add_row("python", f"{platform.python_version()} ({platform.machine()})")
    for name in PACKAGES:
        table.add_row(name, installed_version(name) or "not installed")
    threads, target = usable_processors(), host_target()
    table.add_row("cpu target", target.name)
    table.add_row("processors", processors_text())
    table.add_row("threads of a step", str(thread_count(None)))
    table.add_row("memory", memory_text())
    table.add_row("cache", str(settings().cache_dir))
    try:
        table.add_row("compiler", find_toolchain().version)
        with status_line("measuring read bandwidth"):
            table.add_row("read bandwidth", f"{in_rate(read_bandwidth(target, threads))}, {counted(threads, 'thread')}")
    except ToolchainError as error:
        table.add_row("compiler", Text(error.problem, style="red"))
    standard_output().print(table)


def processors_text() -> str:
    """The cores that this process may use, and the CPU time that its container grants."""
    count, quota = len(os.sched_getaffinity(0)), processor_quota()
    return str(count) if quota is None else f"{count}; the container's quota is the time of {quota:g}"


def memory_text() -> str:
    """The free memory for this process, and its container's limit."""
    from llmc.runtime.memory import available_bytes

    limit, available = memory_limit(), f"{in_bytes(available_bytes())} available"
    return available if limit is None else f"{available}; the container's limit is {in_bytes(limit.most)}"
