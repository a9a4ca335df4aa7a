"""Open an engine's step loop: the executor, what drafts for it, and the pools of blocks."""

from dataclasses import dataclass

from llmc.engine_format import EngineDirectory
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.engine_format.weight_check import WeightCheck
from llmc.program import Limits
from llmc.runtime.executors.absent import AbsentExecutor
from llmc.runtime.executors.opening import open_or_explain
from llmc.runtime.executors.opening_request import CacheRoom
from llmc.runtime.kv_tier.tier import Tier
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.speculation.opening import SpeculationPlan
from llmc.settings import settings


@dataclass(frozen=True)
class LoopOpening:
    """The checked arguments of llmc.load that open a loop, and open it again after a failed step.

    limits, max_step_tokens: limits of the loop's steps. drafts: what drafts, if anything does. threads: number of
    threads of a step. check: the check of the weights. is_temporary: the engine's directory is removed with the loop.
    whole_texts, tier: see StepLoop.
    """

    directory: EngineDirectory
    limits: Limits
    max_step_tokens: int | None
    drafts: SpeculationPlan | None
    executor: ExecutorName | None
    room: CacheRoom
    threads: int
    check: WeightCheck | None
    is_temporary: bool
    whole_texts: bool
    tier: Tier | None

    def open(self) -> StepLoop:
        """A loop without requests. Raises what opening an executor raises."""
        drafts, name, program = self.drafts, self.executor, self.directory.program
        beside = () if drafts is None else drafts.programs
        wish = self.room, self.threads, self.is_temporary, self.check, beside
        executor, blocks = open_or_explain(self.directory, name, *wish)
        is_here = not isinstance(executor, AbsentExecutor)
        speculation = drafts.start(blocks, self.threads, name) if drafts and is_here else None
        bounds, whole = (self.limits, blocks, self.max_step_tokens), self.whole_texts
        return StepLoop(
            executor,
            *bounds,
            program=program,
            speculation=speculation,
            whole_texts=whole,
            tier=self.tier,
            runs_ahead=settings().run_ahead,
        )
