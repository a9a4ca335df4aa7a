"""Choose the executor of an engine: the one that it was built for, or the named one."""

import importlib
import os
from collections.abc import Sequence

from llmc.engine_format import EngineDirectory
from llmc.engine_format.engine_kinds import EXECUTOR_NAMES, ExecutorName, Runner, kind_of_engine
from llmc.engine_format.weight_check import WeightCheck
from llmc.errors import OptionError, TargetError
from llmc.program import Program
from llmc.runtime.executors.absent import AbsentExecutor
from llmc.runtime.executors.executor import Executor
from llmc.runtime.executors.opening_request import CacheRoom, OpeningRequest


def open_or_explain(
    directory: EngineDirectory,
    name: ExecutorName | None,
    room: CacheRoom,
    threads: int,
    is_temporary: bool,
    check: WeightCheck | None = None,
    beside: Sequence[Program] = (),
) -> tuple[Executor, int]:
    """Open an executor as open_executor does. If none was named and this machine cannot run the engine, return an
    executor that raises that error at each step.

    is_temporary: the engine goes when it is closed, and has to be saved first.
    """
    try:
        return open_executor(directory, room, threads, name, check, beside)
    except TargetError as error:
        if name is not None:
            raise
        return AbsentExecutor(_explained(error, directory, is_temporary)), 1


def open_executor(
    directory: EngineDirectory,
    room: CacheRoom,
    threads: int,
    name: ExecutorName | None = None,
    check: WeightCheck | None = None,
    beside: Sequence[Program] = (),
) -> tuple[Executor, int]:
    """The executor, and the number of blocks of its KV cache. name: None takes the one that the engine was built for.
    check, beside: as in OpeningRequest.

    Raises TargetError if this machine lacks a requirement, OptionError for an executor that cannot run the engine.
    """
    return _opened(_runner(directory, name), OpeningRequest(directory, threads, room, check, beside))


def chosen_executor(directory: EngineDirectory, name: ExecutorName | None) -> ExecutorName:
    """The one of that name, or what the engine was built for. Raises OptionError for a name that it is not made for."""
    return _runner(directory, name).name


def open_second(
    directory: EngineDirectory, blocks: int, threads: int, name: ExecutorName | None, check: WeightCheck | None
) -> Executor:
    """The executor of an engine that runs together with another, with `blocks` blocks in each cache group. name: the
    other's executor; if it cannot run this engine, its own default is used. Raises TargetError."""
    can_run = {runner.name for runner in _runners(directory)}
    runner = _runner(directory, name if name in can_run else None)
    return _opened(runner, OpeningRequest(directory.with_one_table(), threads, CacheRoom(), check, blocks=blocks))[0]


def _opened(runner: Runner, request: OpeningRequest) -> tuple[Executor, int]:
    """Open the executor by its own file, which is imported only here: that of GPUs needs torch's parts for them."""
    is_ranked = request.directory.program.layout.ranks > 1
    module, function = runner.opens_ranks if is_ranked and runner.opens_ranks is not None else runner.opens
    opened: tuple[Executor, int] = getattr(importlib.import_module(module), function)(request)
    return opened


def check_executor_name(name: object) -> ExecutorName:
    """Raises OptionError if it is not the name of an executor."""
    for known in EXECUTOR_NAMES:
        if name == known:
            return known
    raise OptionError(
        f"there is no executor {name!r}", at=f"executor={name!r}", fix=f"name one of {', '.join(EXECUTOR_NAMES)}"
    )


def _runners(directory: EngineDirectory) -> list[Runner]:
    """The executors that can run the engine, the default one first."""
    runners = kind_of_engine(directory.manifest.target.name).runners
    can_run = [runner for runner in runners if runner.needs is None or runner.needs in directory.manifest.files]
    return sorted(can_run, key=lambda runner: runner.asked_by is None or os.environ.get(runner.asked_by) != "1")


def _runner(directory: EngineDirectory, name: ExecutorName | None) -> Runner:
    can_run = _runners(directory)
    if name is None:
        return can_run[0]
    check_executor_name(name)
    for runner in can_run:
        if runner.name == name:
            return runner
    # In the table's order, regardless of the environment.
    known = [
        known_runner.name
        for known_runner in kind_of_engine(directory.manifest.target.name).runners
        if known_runner in can_run
    ]
    raise OptionError(
        f"an engine for {directory.manifest.target.name} is run by {' or '.join(known)}, not by {name!r}",
        at=f"executor={name!r}",
        fix=f"name one of {', '.join(known)}",
    )


def _explained(error: TargetError, directory: EngineDirectory, is_temporary: bool) -> TargetError:
    """The error with the missing requirement, how to run the engine where it is met, and the executors that run it
    here."""
    fixes = [error.fix] if error.fix else []
    if is_temporary:
        fixes.insert(0, f"keep the engine: engine.save({f'{directory.manifest.model.name}.llmc'!r})")
    unasked, *others = (runner.name for runner in _runners(directory))
    if unasked != "reference" and "reference" in others:
        fixes.append('here it runs slowly, in torch, by executor="reference" (llmc run ENGINE --executor reference)')
    return TargetError(error.problem, at=error.at, fix="; ".join(fixes))
