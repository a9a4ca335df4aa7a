"""`llmc env`: what this machine and installation are, for bug reports and for predicting speed."""

import os
import platform

from rich.console import Console
from rich.text import Text

from llmc.cache.installed_version import installed_version
from llmc.cli.table import facts, standard_output
from llmc.errors import ToolchainError
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
    threads = len(os.sched_getaffinity(0))
    target = host_target()
    table.add_row("cpu target", target.name)
    table.add_row("threads", str(threads))
    table.add_row("cache", str(settings().cache_dir))
    try:
        table.add_row("compiler", find_toolchain().version)
        with Console(stderr=True).status("measuring read bandwidth"):
            table.add_row("read bandwidth", f"{read_bandwidth(target, threads) / 1e9:.1f} GB/s, {threads} threads")
    except ToolchainError as error:
        table.add_row("compiler", Text(error.problem, style="red"))
    standard_output().print(table)
