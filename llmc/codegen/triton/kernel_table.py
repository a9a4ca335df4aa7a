"""The table from llmc:: ops to the Triton kernels that compute them: the templates in the files of kernels/."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import llmc.ops  # noqa: F401  (registers the ops that the kernels name)
from llmc.codegen.triton import kernels
from llmc.codegen.triton.kernel import KernelTemplate


def _templates() -> Iterator[KernelTemplate]:
    for file in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(file.name)
        yield from (value for value in vars(module).values() if isinstance(value, KernelTemplate))


KERNELS: dict[Any, KernelTemplate] = {template.op: template for template in _templates()}
