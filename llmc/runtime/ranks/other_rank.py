"""The main function of a process that torchrun has started as a rank other than the first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import RankError
from llmc.runtime.ranks.launch import launched

if TYPE_CHECKING:
    from llmc.engine_format.engine_kinds import ExecutorName


def work_for_first_rank(path: Path, threads: int | None, executor: ExecutorName | None = None) -> None:
    """Serve as another rank than the first, if torchrun started this process as one: until the first closes the engine,
    which ends this process. Returns at once in all other processes. executor: the requested executor.

    Raises RankError in all processes for an engine or an executor whose ranks torchrun cannot start, and LlmcError.
    """
    launch = launched(os.environ)
    if launch is None:
        return
    # These take long to import.
    from llmc.engine_format.reader import read_engine
    from llmc.runtime.executors.opening import chosen_executor
    from llmc.runtime.threads import thread_count

    engine = read_engine(path, check_weights=False, check_machine=False)
    if engine.program.layout.ranks == 1:
        return
    chosen = chosen_executor(engine, executor)
    if chosen != "cpp":
        raise RankError(
            f"torchrun has started {launch.ranks} processes, and an engine for {engine.manifest.target.name} that "
            f"{chosen} runs has its ranks on one machine, which it starts itself",
            at=path,
            fix="start one process, without torchrun; engines for CPUs run on ranks that torchrun starts",
        )
    if launch.rank > 0:
        from llmc.runtime.ranks.between_machines import join_ranks

        join_ranks(read_engine(path), launch, thread_count(threads))
        raise SystemExit(0)
