"""Run a GPU engine without a GPU: the kernels' own sources through Triton's interpreter, on tensors of the CPU.

For tests and for looking into kernels: thousands of times slower than a device. TRITON_INTERPRET=1 must be in the
environment before Triton is imported. It cuts off what a device rounds to bf16: build with float32 or float16.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import llmc.ops  # noqa: F401  (registers the ops that the kernels' sources name)
from llmc.engine_format import EngineDirectory
from llmc.errors import OptionError
from llmc.program import Program
from llmc.runtime.device.program import PlannedCall
from llmc.runtime.executors.host_launches import HostLaunches
from llmc.runtime.executors.opening_request import OpeningRequest
from llmc.runtime.executors.stored_weights import stored_tensor


def open_engine(request: OpeningRequest) -> tuple[TritonInterpreterExecutor, int]:
    """Open an engine in this machine's memory; for an engine of several ranks, the executor of the first."""
    request.wait_for_weights()
    blocks, snapshots = request.in_host_memory()
    return interpret_rank(request.directory, blocks, snapshots), blocks


def interpret_rank(engine: EngineDirectory, blocks: int, snapshots: int = 0) -> TritonInterpreterExecutor:
    """Return the executor of one rank. engine: has the rank's weights."""
    slots = zip(engine.program.weights, engine.tensors, strict=True)
    weights = {slot.name: stored_tensor(engine, stored) for slot, stored in slots}
    return TritonInterpreterExecutor(engine.program, engine.path, weights, blocks, snapshots)


class TritonInterpreterExecutor(HostLaunches):
    """A program whose kernels' sources are interpreted. directory: the engine's, or any that has them."""

    def __init__(
        self, program: Program, directory: Path, weights: Mapping[str, Tensor], blocks: int, snapshots: int = 0
    ) -> None:
        switch_on()
        allow_computed_bounds()
        super().__init__(program, weights, blocks, snapshots)
        sources = {kernel.source for kernel in program.kernels if not kernel.is_library}
        modules = {source: _load_module(directory / source) for source in sorted(sources)}
        self._functions = {
            k.name: interpretable(vars(modules[k.source]), k.function) for k in program.kernels if not k.is_library
        }

    def run_kernel(self, call: PlannedCall, grid: tuple[int, int, int], counts: Mapping[str, int]) -> None:
        """Interpret one launch."""
        # Lanes that nothing is stored of, such as a tile's rows past the last query, divide 0 by 0, as a GPU's do.
        with np.errstate(invalid="ignore"):
            self._functions[call.kernel.name][grid](**call.kernel.constants, **self.named(call, counts))


def interpretable(module: Mapping[str, Any], function: str) -> Any:
    """The function of a kernel, or for one in Gluon the one in the same module that the interpreter runs instead."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    return module[f"interpreted_{function}" if isinstance(module[function], GluonJITFunction) else function]


def switch_on() -> None:
    """Set TRITON_INTERPRET=1, which Triton reads when it is imported. Raises OptionError if it has been."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    if "triton" in sys.modules:
        raise OptionError(
            "this process has loaded Triton without its interpreter, as every build for a GPU does",
            at="executor='triton_interpreter'",
            fix="set TRITON_INTERPRET=1 before Python starts, or load the engine in a separate process",
        )
    os.environ["TRITON_INTERPRET"] = "1"


def allow_computed_bounds() -> None:
    """Let kernels loop up to numbers that they compute, with a Triton older than 3.9 and NumPy 2.4 or newer.

    The interpreter keeps such a number in an array of one element, which NumPy takes as an index no longer; newer
    Triton squeezes it first. Doing this again changes nothing.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    if patch_tensor.__module__ == __name__:
        return

    def patch_and_squeeze(tensor: Any, *rest: Any) -> None:
        patch_tensor(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_and_squeeze


def _load_module(path: Path) -> Any:
    """A file of kernels as a separate module; it may import what the installed llmc has."""
    spec = importlib.util.spec_from_file_location(f"llmc_engine_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
