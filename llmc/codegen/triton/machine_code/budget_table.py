"""The budgets in the kernels' files, by the kernels' functions."""

import importlib
import pkgutil

import llmc.ops  # noqa: F401  (registers the ops that the kernels name)
from llmc.codegen.triton import kernels
from llmc.codegen.triton.machine_code.budget import Budget


def budgets() -> dict[str, Budget]:
    """Return every `Budget` in the modules of kernels, by the name of its function."""
    table: dict[str, Budget] = {}
    for file in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(file.name)
        table |= {value.function: value for value in vars(module).values() if isinstance(value, Budget)}
    return table
