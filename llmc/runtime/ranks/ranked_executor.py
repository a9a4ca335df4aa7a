"""Run an engine of several ranks on CPUs, with this process as the first rank.

The first rank schedules and samples. A step's arrays go through shared memory and are announced by a message. All ranks
then run the step together, synchronized by its collectives (codegen/cpp/kernels/ranks.h). A rank that ends is seen by
its socket: the others leave their collectives, and the step is an error that names it.
"""

import ctypes
import os
from collections.abc import Mapping

import numpy as np

from llmc.engine_format import EngineDirectory
from llmc.engine_format.weight_check import WeightCheck
from llmc.errors import RankError
from llmc.program import StepOutput
from llmc.program.engine_structs import LlmcRanks
from llmc.runtime.executors.cpp import ChoosingCppExecutor, open_library
from llmc.runtime.executors.executor import Chosen, Logits
from llmc.runtime.loop.step import Ints, Step
from llmc.runtime.ranks.launch import launched
from llmc.runtime.ranks.local_ranks import start_ranks
from llmc.runtime.ranks.losses import Losses
from llmc.runtime.ranks.rank_plan import RankPlan
from llmc.runtime.ranks.team import Team
from llmc.runtime.sampling.row_choice import RowChoices


class RankedCppExecutor(Losses, ChoosingCppExecutor):
    """As ChoosingCppExecutor, with a part of the weights and of the cache in each of several processes.

    threads: number of threads of all ranks of this machine together. The others are started here, unless torchrun has
    started them. Raises RankError for a rank that does not come up.
    """

    def __init__(self, engine: EngineDirectory, blocks: int, threads: int, check: WeightCheck | None = None) -> None:
        self.ranks = ranks = engine.program.layout.ranks
        exchange = open_library(engine).llmc_engine_ranks_bytes
        exchange.restype = ctypes.c_int64
        self._launch = launched(os.environ)
        own = max(1, threads // (ranks if self._launch is None else self._launch.local_ranks))
        self._directory = engine
        self._plan = RankPlan(0, ranks, blocks, own, int(exchange(engine.program.layout.tensor)))
        self._place = LlmcRanks()
        self._team = self._gather()
        try:
            super().__init__(engine, blocks, own, check, ranks=self._place)
            # Stages hand logits from one to the other.
            self._chooses_across = self._chooses_across and engine.program.layout.pipeline == 1
        except BaseException:
            self._team.close()
            raise

    def step(self, step: Step) -> Logits:
        """Run a step on all ranks. Raises RankError that names a rank which has ended; no later step works then."""
        self._team.tell_step(step)
        logits = super().step(step)
        self._team.check()
        return logits

    def choose(self, step: Step, wanted: StepOutput, choices: RowChoices) -> Chosen:
        """Run a step, then choose its rows' tokens. If no row has filters and logits are not needed, each rank chooses
        among its own logits, which are not gathered; they are still gathered if a score is not finite."""
        if not self._chooses_across or wanted is StepOutput.FILTERED or choices.reads_logits:
            return super().choose(step, wanted, choices)
        self._team.tell_step(step, choices=choices)
        self.run_choosing(step, choices)
        self._team.check()
        self._end_check()
        rows = len(step.logit_rows)
        chosen = Chosen(self._tokens[:rows].copy(), self._scores[:rows].copy(), self._covered[:rows])
        if not np.isfinite(chosen.scores).all():
            self.step(step)
        return chosen

    def copy_blocks(self, copies: Mapping[int, int], group: int = 0) -> None:
        """Apply this to every rank's layers."""
        self._team.tell({"do": "copy_blocks", "to": list(copies), "from": list(copies.values()), "group": group})
        super().copy_blocks(copies, group)

    def move_slots(self, sources: Ints, destinations: Ints, group: int = 0) -> None:
        """Apply this to every rank's layers."""
        self._team.tell({"do": "move_slots", "from": sources.tolist(), "to": destinations.tolist(), "group": group})
        super().move_slots(sources, destinations, group)

    def reopen(self) -> None:
        """Start the other ranks again after one was lost. Raises RankError, also where torchrun has started them."""
        if self._launch is not None:
            raise RankError(
                f"{self._team.error().problem}, and torchrun has to start the ranks again",
                at="the engine's ranks",
                fix="give torchrun --max-restarts",
                rank=self._team.error().rank,
            )
        self._team.close()
        self._team = self._gather()

    def close(self) -> None:
        """Close the executor, and end the other ranks."""
        self._team.close()
        super().close()

    def _gather(self) -> Team:
        if self._launch is None:
            team = start_ranks(self._directory, self._plan, self._tell_lost)
        else:
            from llmc.runtime.ranks.between_machines import gather_ranks

            team = gather_ranks(self._directory, self._plan, self._launch, self._tell_lost)
        # The library keeps a pointer to the place.
        for name, *_ in LlmcRanks._fields_:
            setattr(self._place, name, getattr(team.place, name))
        return team
