"""Kinds of engines by kind of target: one row per kind with the file that is executed and the executors that run it.

The table is independent of the runtime, because readers of engines use it as well. It names executors, which are
imported when one is opened. llmc/codegen/target_kind.py builds such engines.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from llmc.targets import ONNXRUNTIME, REFERENCE, is_gpu_target

ExecutorName = Literal["cpp", "cuda", "onnxruntime", "onnxruntime_cuda", "ptx", "reference", "triton_interpreter"]
EXECUTOR_NAMES: tuple[ExecutorName, ...] = get_args(ExecutorName)

PROGRAM_NAME = "program.json"
# Named after its content: a process that still holds an older library must not be given that one for a new engine,
# and the dynamic loader knows libraries by their paths.
LIBRARY_NAME = re.compile(r"kernels/engine-[0-9a-f]{16}\.so")
GRAPH_NAME = "graph.json"
MODEL_NAME = "model.onnx"


@dataclass(frozen=True)
class Runner:
    """An executor. opens: its module and the function in it that opens an engine, given an OpeningRequest
    (runtime/executors/opening_request.py). opens_ranks: the same for an engine of several ranks; None if one process
    runs all of them. needs: a file without which an engine cannot be run so. asked_by: the
    environment's variable that, where it is 1, makes it the one that runs engines unasked."""

    name: ExecutorName
    opens: tuple[str, str]
    opens_ranks: tuple[str, str] | None = None
    needs: str | None = None
    asked_by: str | None = None


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine, by its targets. is_for: whether a target of that name is of the kind. executed: the name of the
    one file that executors open; for GPUs the program, which names the binaries. runners: the first runs engines
    unasked."""

    is_for: Callable[[str], bool]
    executed: re.Pattern[str]
    runners: tuple[Runner, ...]


def _opens(module: str, function: str = "open_engine") -> tuple[str, str]:
    return f"llmc.runtime.executors.{module}", function


def _opens_ranks(function: str) -> tuple[str, str]:
    return "llmc.runtime.ranks.opening", function


_REFERENCE = Runner("reference", _opens("reference"), needs=GRAPH_NAME)
# The first kind whose `is_for` holds. The last kind covers all CPU instruction sets.
ENGINE_KINDS: tuple[EngineKind, ...] = (
    EngineKind(
        is_gpu_target,
        re.compile(re.escape(PROGRAM_NAME)),
        (
            Runner("cuda", _opens("cuda_opening"), _opens_ranks("open_on_gpus")),
            Runner(
                "triton_interpreter",
                _opens("triton_interpreter"),
                _opens_ranks("open_interpreted"),
                asked_by="TRITON_INTERPRET",
            ),
            Runner("ptx", _opens("ptx"), _opens_ranks("open_executed")),
            _REFERENCE,
        ),
    ),
    EngineKind(
        lambda target: target == ONNXRUNTIME.name,
        re.compile(re.escape(MODEL_NAME)),
        (
            Runner("onnxruntime", _opens("onnx_runtime")),
            Runner("onnxruntime_cuda", _opens("onnx_runtime", "open_on_device")),
        ),
    ),
    EngineKind(lambda target: target == REFERENCE.name, re.compile(re.escape(GRAPH_NAME)), (_REFERENCE,)),
    EngineKind(lambda target: True, LIBRARY_NAME, (Runner("cpp", _opens("cpp"), _opens_ranks("open_on_cpus")),)),
)


def kind_of_engine(target: str) -> EngineKind:
    """The kind of the engines for a target of that name, or for several GPUs."""
    return next(kind for kind in ENGINE_KINDS if kind.is_for(target))
