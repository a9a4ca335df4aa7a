"""The runtime's loop: schedule → execute → sample → publish, one step at a time."""

import time

import numpy as np

from llmc.errors import EngineFailureError, words_of
from llmc.program import TREE_REACH, Limits, Program
from llmc.runtime.executors.executor import (
    AdaptedExecutor,
    ChoosingExecutor,
    CompactingExecutor,
    Executor,
    OffloadingExecutor,
    QueueingExecutor,
    SnapshotExecutor,
    StateExecutor,
)
from llmc.runtime.kv_tier.block_offload import BlockOffload
from llmc.runtime.kv_tier.tier import Tier
from llmc.runtime.loop.publish import choices_of, compute, compute_choosing, publish
from llmc.runtime.loop.run_ahead import RunAhead
from llmc.runtime.loop.step_inputs import StatefulStepInputs, StepInputs
from llmc.runtime.prefix_cache.state_snapshots import StateSnapshots
from llmc.runtime.requests.boundary import attempt
from llmc.runtime.requests.request import Origin, Request
from llmc.runtime.scheduling.adapter_slots import AdapterSlots
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.scheduling.group_pool import group_pools
from llmc.runtime.scheduling.request_blocks import Cuts
from llmc.runtime.scheduling.scheduler import Scheduler
from llmc.runtime.scheduling.step_plan import StepPlan
from llmc.runtime.speculation.speculation import Speculation


def step_failure(error: BaseException) -> EngineFailureError:
    """The failure of a step that no request has caused."""
    if isinstance(error, EngineFailureError):
        return error
    reason = words_of(error, 300)
    failure = EngineFailureError(
        f"a step of the engine has failed: {type(error).__name__}{': ' * bool(reason)}{reason}",
        fix="see the exception that caused this error, and open the engine again",
    )
    failure.__cause__ = error
    return failure


class StepLoop:
    """Runs requests together on one executor; each step serves every request that fits in it.

    blocks: number of blocks of the executor's KV cache. max_step_tokens: a lower limit of tokens per step than the
    engine's. executor_seconds: time of the last step in the executor. speculation: the drafter, if any. program: the
    executor's program, for its adapters, states and cache groups; None only if it has none of them. whole_texts: a
    request's tokens come in one step. tier: receives the blocks that leave the pools. runs_ahead: whether decodes are
    queued before the tokens of the step before are read, where the executor can do that.
    """

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        blocks: int,
        max_step_tokens: int | None = None,
        *,
        program: Program | None,
        speculation: Speculation | None = None,
        whole_texts: bool = False,
        tier: Tier | None = None,
        runs_ahead: bool = True,
    ) -> None:
        self.speculation = speculation
        self.executor = executor
        self._limits = limits
        self._max_step_tokens = max_step_tokens
        self._is_computing = False
        # Asked once: looking at an object's methods takes longer than the scheduler.
        self._chooser = executor if isinstance(executor, ChoosingExecutor) else None
        pools, has_states = (None, False) if program is None else (program.adapters, bool(program.states))
        self._adapted = executor if pools is not None and isinstance(executor, AdaptedExecutor) else None
        self._program = program
        slots = None if pools is None or self._adapted is None else AdapterSlots(pools.slots)
        self._slots = slots
        slack = 0 if speculation is None else TREE_REACH
        self._blocks = blocks
        self.groups = () if program is None else group_pools(program, blocks, slack)
        inputs = StatefulStepInputs if has_states else StepInputs
        policies = () if program is None else program.policies
        numbering = next((group for group, policy in enumerate(policies, 1) if policy.renumbers), 0)
        self._inputs = inputs(limits, slots, 1 + len(self.groups), numbering)
        self.pool = BlockPool(blocks if program is None else program.group_blocks(blocks)[0])
        if speculation is not None:
            speculation.watch(self.pool)
        self._whole_texts = whole_texts
        self._tier = tier
        self._offload = (
            BlockOffload(tier, executor) if tier is not None and isinstance(executor, OffloadingExecutor) else None
        )
        self.scheduler = Scheduler(
            limits,
            self.pool,
            max_step_tokens,
            speculation=speculation,
            adapters=slots,
            snapshots=self._state_snapshots(),
            whole_texts=whole_texts,
            groups=self.groups,
            offload=self._offload,
            move_rows=self._move_rows,
        )
        self._runs_ahead = runs_ahead
        self._ahead: RunAhead | None = None
        # A step of states cannot run twice, and drafts follow from the tokens.
        if runs_ahead and speculation is None and not has_states and isinstance(executor, QueueingExecutor):
            self._ahead = RunAhead(executor, self._inputs, self.scheduler)
        self.executor_seconds = 0.0

    @property
    def finds_prefixes(self) -> bool:
        """Whether a request can start from blocks that another has left; models with states also need snapshots."""
        snapshots = self.scheduler.prefix_cache.snapshots
        return snapshots is None or snapshots.count > 0

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def remove(self, request: Request) -> None:
        """Drop a request, finished or not, and free its blocks."""
        self.scheduler.remove(request)

    def drop(self, origin: Origin) -> None:
        """Drop all sequences of a client's request, and free their blocks."""
        self.scheduler.drop(origin)

    def expire(self) -> list[Request]:
        """End the requests whose deadline has passed, and free their blocks."""
        expired = self.scheduler.expired()
        for request in expired:
            error = attempt(request.expire)
            if error is not None:
                self.scheduler.fail(request, error)
            self.scheduler.remove(request)
        self.scheduler.drop_failed()
        return expired

    def step(self) -> StepPlan:
        """Run one step that the scheduler chooses. Logits that are not needed stay on the device.

        A request that fails in it, which its `error` says, is in the plan, and holds nothing any more.
        """
        plan = self._step()
        self.scheduler.drop_failed()
        return plan

    def _step(self) -> StepPlan:
        if self._ahead is not None:
            finished = self._ahead.step()
            if finished is not None:
                self.executor_seconds = self._ahead.executor_seconds
                return finished
        plan = self.scheduler.schedule()
        if not plan:
            return plan
        speculation = self.speculation
        if speculation is not None and speculation.is_idle and not plan.chunks:
            speculation = None
        step = self._inputs.fill(plan, () if speculation is None else speculation.sides(plan))
        begin = time.perf_counter()
        self._is_computing = True
        if self._slots is not None and self._adapted is not None:
            self._put_adapters(plan, self._slots, self._adapted)
        if plan.copies:
            self.executor.copy_blocks(plan.copies)
        for group, copies in plan.group_copies.items():
            if copies:
                self.executor.copy_blocks(copies, group)
        chooser = self._chooser
        if chooser is None:
            results = compute(self.executor, step)
        else:
            choices = choices_of(plan, self.scheduler)
            if self._ahead is not None and self._ahead.begin(plan, step, choices):
                self._is_computing = False
                return self._step()
            results = compute_choosing(chooser, step, choices)
        self._is_computing = False
        self.executor_seconds = time.perf_counter() - begin
        self._inputs.advance(publish(plan, results, self.scheduler, self.executor.move_slots))
        if speculation is not None:
            for request, error in speculation.observe(plan, self.executor, results).items():
                self.scheduler.fail(request, error)
        return plan

    def _move_rows(self, cuts: Cuts) -> None:
        """Move the rows of tables that are cut. The loop recovers from a failure as from one of a step."""
        self._is_computing = True
        for compaction in cuts.compactions:
            assert isinstance(self.executor, CompactingExecutor), "the engine was built for another executor"
            self.executor.compact(np.array(compaction, np.int32))
        for group, moves in cuts.moves.items():
            sources, destinations = np.array(moves, np.int32).T.copy()
            self.executor.move_slots(sources, destinations, group)
        self._is_computing = False

    def _put_adapters(self, plan: StepPlan, slots: AdapterSlots, executor: AdaptedExecutor) -> None:
        """Write what requests have that begin in this step. They fail with an adapter that cannot be written."""
        for slot, adapter in slots.take_writes():
            error = attempt(executor.put_adapter, slot, adapter)
            if error is not None:
                slots.lose(adapter)
                for chunk in plan.chunks:
                    if chunk.request.adapter is adapter:
                        self.scheduler.fail(chunk.request, error)

    def recover(self) -> bool:
        """Take all blocks back after a step that raised, so that its tokens are computed again.

        False if it broke off elsewhere than in the executor, perhaps between choosing tokens and giving them out: then
        the loop and its requests are lost.
        """
        is_whole, self._is_computing = self._is_computing, False
        if self._ahead is not None:
            is_whole = is_whole or self._ahead.is_computing
            self._ahead.forget()
        if is_whole:
            self.scheduler.drop_failed()
            self.scheduler.preempt_all()
        return is_whole

    def renewed(self) -> "StepLoop":
        """Return another loop of the same executor, with no requests and no cached blocks."""
        speculation = None if self.speculation is None else self.speculation.renewed()
        return StepLoop(
            self.executor,
            self._limits,
            self._blocks,
            self._max_step_tokens,
            speculation=speculation,
            program=self._program,
            whole_texts=self._whole_texts,
            tier=self._tier,
            runs_ahead=self._runs_ahead,
        )

    def offload_all(self) -> None:
        """Let the second tier keep what the prefix cache holds, for another process."""
        if self._offload is not None and self._offload.tier.outlives:
            self.scheduler.prefix_cache.offload_all(self._offload)

    def _state_snapshots(self) -> StateSnapshots | None:
        """Return the snapshots of states; None for a model without states, and for an engine that cannot run."""
        program, executor = self._program, self.executor
        if program is None or not program.states or not isinstance(executor, StateExecutor):
            return None
        seats = program.limits.max_sequences
        count = executor.snapshots if isinstance(executor, SnapshotExecutor) else 0
        return StateSnapshots(range(seats, seats + count), executor.copy_states, self._limits.block_size)
