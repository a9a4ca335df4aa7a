"""Which executor runs an engine: what it was built for, or what was asked for by name."""

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from llmc.engine_format import EngineDirectory
from llmc.engine_format.reader import GRAPH_NAME, MODEL_NAME, REFERENCE_TARGET, check_target
from llmc.engine_format.weight_check import WeightCheck
from llmc.errors import OptionError, TargetError
from llmc.program import Program
from llmc.runtime.executors.absent import AbsentExecutor
from llmc.runtime.executors.executor import Executor
from llmc.runtime.kv_capacity import block_count
from llmc.runtime.memory import available_bytes
from llmc.runtime.prefix_cache.snapshot_capacity import snapshot_count

ExecutorName = Literal["cpp", "cuda", "onnxruntime", "onnxruntime_cuda", "reference", "triton_interpreter"]
EXECUTOR_NAMES: tuple[ExecutorName, ...] = get_args(ExecutorName)


class CacheRoom(NamedTuple):
    """What llmc.load is asked to give the caches; None for the default."""

    kv_cache_bytes: int | None
    kv_memory: float | None
    state_cache_bytes: int | None


def open_or_explain(
    directory: EngineDirectory,
    name: ExecutorName | None,
    room: CacheRoom,
    threads: int,
    is_temporary: bool,
    check: WeightCheck | None = None,
    beside: Sequence[Program] = (),
) -> tuple[Executor, int]:
    """As open_executor; where this machine cannot run the engine and none was named, one that says so at each step.

    is_temporary: the engine goes when it is closed, and has to be saved first.
    """
    try:
        kv_cache_bytes, kv_memory, state_cache_bytes = room
        return open_executor(directory, kv_cache_bytes, kv_memory, threads, name, check, beside, state_cache_bytes)
    except TargetError as error:
        if name is not None:
            raise
        return AbsentExecutor(_explained(error, directory, is_temporary)), 1


def open_executor(
    directory: EngineDirectory,
    kv_cache_bytes: int | None,
    kv_memory: float | None,
    threads: int,
    name: ExecutorName | None = None,
    check: WeightCheck | None = None,
    beside: Sequence[Program] = (),
    state_cache_bytes: int | None = 0,
) -> tuple[Executor, int]:
    """The executor, and how many blocks its KV cache has. name: None for what the engine was built for. check: of the
    weights, under way; the executor gives nothing away before it has ended well. beside: of engines that will be
    opened with as many blocks. state_cache_bytes: of snapshots of states; None as in snapshot_count.

    Raises TargetError if this machine has not what it needs, OptionError for a name that the engine is not made for.
    """
    chosen = chosen_executor(directory, name)
    if chosen == "cuda":
        from llmc.runtime.executors.cuda import open_cuda

        if check is not None:
            check.wait()
        executor = open_cuda(directory, kv_cache_bytes, kv_memory, state_cache_bytes, beside=beside)
        return executor, executor.blocks
    if chosen == "cpp":
        check_target(directory.path, directory.manifest.target)
    snapshots = snapshot_count(directory.program, state_cache_bytes, available_bytes())
    blocks = block_count(directory.whole_program, kv_cache_bytes, kv_memory, beside, snapshots)
    return _opened(directory, blocks, threads, chosen, check, snapshots), blocks


def chosen_executor(directory: EngineDirectory, name: ExecutorName | None) -> ExecutorName:
    """The one of that name, or what the engine was built for. Raises OptionError for a name that it is not made for."""
    chosen = _default(directory) if name is None else check_executor_name(name)
    _check_name(directory, chosen)
    return chosen


def open_second(
    directory: EngineDirectory, blocks: int, threads: int, name: ExecutorName | None, check: WeightCheck | None
) -> Executor:
    """The executor of an engine that runs beside another, with so many blocks in each group of caches. name: of the
    other's; its own is what it was built for where it cannot be run so. Raises TargetError."""
    chosen, directory = name if name in _runners(directory) else _default(directory), directory.with_one_table()
    if chosen == "cpp":
        check_target(directory.path, directory.manifest.target)
    return _opened(directory, blocks, threads, chosen, check)


def _opened(
    directory: EngineDirectory,
    blocks: int,
    threads: int,
    chosen: ExecutorName,
    check: WeightCheck | None,
    snapshots: int = 0,
) -> Executor:
    if chosen == "cpp":
        from llmc.runtime.executors.cpp import open_cpp

        return open_cpp(directory, blocks, threads, check, snapshots)
    if check is not None:
        check.wait()  # These copy the weights first, which takes longer.
    if chosen == "cuda":
        from llmc.runtime.executors.cuda import open_cuda

        return open_cuda(directory, None, blocks=blocks)
    if chosen in ("onnxruntime", "onnxruntime_cuda"):
        from llmc.runtime.executors.onnx_runtime import OnnxRuntimeExecutor

        return OnnxRuntimeExecutor(directory, blocks, threads, on_device=chosen == "onnxruntime_cuda")
    if chosen == "triton_interpreter":
        from llmc.runtime.executors.triton_interpreter import interpret_engine

        return interpret_engine(directory, blocks, snapshots)
    from llmc.runtime.executors.reference import ReferenceExecutor

    return ReferenceExecutor(directory, blocks, snapshots)


def check_executor_name(name: object) -> ExecutorName:
    """Raises OptionError for what is no executor of any engine."""
    for known in EXECUTOR_NAMES:
        if name == known:
            return known
    raise OptionError(
        f"there is no executor {name!r}", at=f"executor={name!r}", fix=f"name one of {', '.join(EXECUTOR_NAMES)}"
    )


def _default(directory: EngineDirectory) -> ExecutorName:
    if directory.program.kernels:
        return "triton_interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    if MODEL_NAME in directory.manifest.files:
        return "onnxruntime"
    return "reference" if directory.manifest.target.name == REFERENCE_TARGET else "cpp"


def _runners(directory: EngineDirectory) -> list[str]:
    can_run: list[str] = ["cuda", "triton_interpreter"] if directory.program.kernels else []
    if MODEL_NAME in directory.manifest.files:
        return ["onnxruntime", "onnxruntime_cuda"]
    if GRAPH_NAME in directory.manifest.files:
        can_run.append("reference")
    elif not can_run:
        can_run.append("cpp")
    return can_run


def _check_name(directory: EngineDirectory, name: str) -> None:
    can_run = _runners(directory)
    if name in can_run:
        return
    raise OptionError(
        f"an engine for {directory.manifest.target.name} is run by {' or '.join(can_run)}, not by {name!r}",
        at=f"executor={name!r}",
        fix=f"name one of {', '.join(can_run)}",
    )


def _explained(error: TargetError, directory: EngineDirectory, is_temporary: bool) -> TargetError:
    """What is missing, how to run the engine where it is there, and what runs it here."""
    fixes = [error.fix] if error.fix else []
    if is_temporary:
        fixes.insert(0, f"keep the engine: engine.save({f'{directory.manifest.model.name}.llmc'!r})")
    if directory.program.kernels and GRAPH_NAME in directory.manifest.files:
        fixes.append('here it runs slowly, in torch, by executor="reference" (llmc run ENGINE --executor reference)')
    return TargetError(error.problem, at=error.at, fix="; ".join(fixes))
