"""The scheduler with requests of all kinds, in any order: no block leaks, all get done, and each says what it would
alone. What must hold before and after every step is checked by model_free.py.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llmc.program import H2O, CachePolicy, Compactor, KVzip, Limits, Nearest, Streaming, Stride, TriAttention
from llmc.runtime.requests.generation_request import Priority
from llmc.runtime.requests.request import Request
from llmc.runtime.speculation.drafter import Drafter
from llmc.runtime.speculation.speculation import Speculation
from tests.cache_policies.every_other_block import EveryOtherBlock
from tests.cache_policies.sinks_and_recent import SinksAndRecent
from tests.runtime.model_free import PROMPT, Counted, Run, next_token
from tests.runtime.scheduling.lockstep import Lockstep, Member
from tests.runtime.speculation.guesses import Guesses, Trees, Wavering
from tests.runtime.speculation.second_cells import SecondCells

POLICIES = (
    (),
    (),
    (Nearest(5, None),),
    (Nearest(None, 8),),
    (Nearest(1, None), Nearest(7, 12)),
    (SinksAndRecent(3, 6),),
    (EveryOtherBlock(4, 4, 2),),
    (Stride(step=2, recent=4, rows=4),),
    (Streaming(budget=8, sinks=3, every=4),),
    (H2O(budget=32, every=4, recent=4, block=4), Nearest(5)),
    (Compactor(budget=12, every=4, sinks=4, block=4, recent=1, chunk=8), Nearest(9)),
    (TriAttention(budget=4, every=4, block=4),),
    (KVzip(budget=4, every=3, sinks=1, block=4, chunk=5), Nearest(4)),
    (KVzip(budget=8, every=4, sinks=0, block=4, chunk=3, prefix=14), Nearest(5), Nearest(7)),
    (SinksAndRecent(6, 1), EveryOtherBlock(4, 3, 1), Nearest(9)),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of all kinds arrive, fork, wait for each other, fail, are aborted and run out of time, in any order, on
    a small pool."""

    @initialize(
        budget=st.integers(2, 16),
        sequences=st.integers(1, 5),
        rows=st.integers(1, 6),
        blocks=st.integers(8, 20),
        drafts=st.sampled_from((None, None, 1, 5)),
        drafter=st.sampled_from(("chains", "trees", "second engine")),
        snapshots=st.integers(0, 8),
        spacing=st.sampled_from((1, 5, 8)),
        policies=st.sampled_from(POLICIES),
        tier_blocks=st.sampled_from((None, 1, 12, 200)),
    )
    def start(
        self,
        budget: int,
        sequences: int,
        rows: int,
        blocks: int,
        drafts: int | None,
        drafter: str,
        snapshots: int,
        spacing: int,
        policies: tuple[CachePolicy, ...],
        tier_blocks: int | None,
    ) -> None:
        """States exclude drafts, a second tier, and second readings."""
        self.now = 0.0
        reads_again = any(isinstance(policy, KVzip) for policy in policies)
        budget = max(budget, 13) if reads_again else budget  # A part of a second reading is not longer.
        limits = Limits(budget, sequences, rows, max_model_len=32, block_size=4)

        def new_drafter() -> Drafter:
            if drafter == "second engine":
                return SecondCells(blocks, limits)
            return Trees(next_token, 97) if drafter == "trees" else Guesses(next_token, 97)

        speculation = None if drafts is None else Speculation(new_drafter, drafts, Wavering)
        self.run = Run(
            limits,
            blocks,
            clock=lambda: self.now,
            speculation=speculation,
            snapshots=snapshots if drafts is None and tier_blocks is None and not reads_again else None,
            spacing=spacing,
            policies=policies,
            tier_blocks=tier_blocks,
        )
        self.dropped: set[Request] = set()
        self.groups: list[Lockstep] = []

    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(1, 20),
        output=st.integers(1, 12),
        kind=st.sampled_from(("plain", "plain", "scoring", "forking")),
        priority=st.sampled_from(Priority),
        salt=st.sampled_from((None, b"", b"other")),
        patience=st.none() | st.integers(1, 30),
        breaks_at=st.none() | st.integers(0, 30),
    )
    def arrive(
        self,
        prefix: int,
        length: int,
        output: int,
        kind: str,
        priority: Priority,
        salt: bytes | None,
        patience: int | None,
        breaks_at: int | None,
    ) -> None:
        request = Counted(
            [(prefix + token) % 97 for token in PROMPT[:length]],
            output,
            every_logit=kind == "scoring",
            forks=2 if kind == "forking" else 0,
            priority=priority,
            salt=salt,
            arrived=self.now,
            deadline=None if patience is None or kind == "forking" else self.now + patience,
        )
        self.run.add(request)
        if breaks_at is not None:
            self.run.breaks_at[request] = breaks_at

    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(1, 20),
        output=st.integers(1, 12),
        width=st.integers(2, 4),
        priority=st.sampled_from(Priority),
        salt=st.sampled_from((None, b"", b"other")),
        patience=st.none() | st.integers(1, 30),
    )
    def arrive_in_lockstep(
        self,
        prefix: int,
        length: int,
        output: int,
        width: int,
        priority: Priority,
        salt: bytes | None,
        patience: int | None,
    ) -> None:
        group = Lockstep(
            [(prefix + token) % 97 for token in PROMPT[:length]],
            output,
            width,
            self.run.requests,
            priority=priority,
            salt=salt,
            arrived=self.now,
            deadline=None if patience is None else self.now + patience,
        )
        self.groups.append(group)
        self.run.scheduler.add(group.first)

    @rule(number=st.integers(0, 50))
    def abort(self, number: int) -> None:
        if self.run.requests:
            self._drop(self.run.requests[number % len(self.run.requests)])

    @rule(number=st.integers(0, 50), after=st.integers(0, 9))
    def fail(self, number: int, after: int) -> None:
        """One of the next tokens that the request computes makes NaN."""
        if self.run.requests:
            request = self.run.requests[number % len(self.run.requests)]
            self.run.breaks_at[request] = request.computed + after

    @rule(steps=st.integers(1, 6))
    @precondition(lambda self: not self.run.scheduler.idle)
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 1.0
            for request in self.run.scheduler.expired():
                self._drop(request)
            self.run.step()

    def _drop(self, request: Request) -> None:
        if isinstance(request, Member):
            request.group.finished = True
        for each in _together(request):
            if not each.finished:
                self.dropped.add(each)
            each.end()
            self.run.scheduler.remove(each)

    @invariant()
    def accounts_hold(self) -> None:
        self.run.check_accounts()

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        limit = self.run.steps + 100 + 40 * len(self.run.requests) + 100 * len(self.groups)
        while not self.run.scheduler.idle:
            self.run.step()
            assert self.run.steps < limit, "no progress"
        assert self.run.pool.used == 0 and not any(group.pool.used for group in self.run.groups)
        assert all(group.finished for group in self.groups)
        broken = {each for request in self.run.breaks_at for each in _together(request)}
        for request in self.run.requests:
            assert request.finished and (request.error is None or request in broken)
            if isinstance(request, Counted) and request.error is None and request not in self.dropped:
                assert request.tokens == request.expected()


SchedulerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
test_nothing_leaks_and_every_request_says_what_it_would_alone = SchedulerMachine.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_thousands_of_sequences(number: int) -> None:
    """250 of each seed: all in one test would take longer than a test may."""

    class Machine(SchedulerMachine):
        """The seed is an attribute of the class."""

    more = settings(SchedulerMachine.TestCase.settings, max_examples=250)
    run_state_machine_as_test(seed(number)(Machine), settings=more)


def _together(request: Request) -> list[Request]:
    """The request and those that end with it."""
    if isinstance(request, Member):
        return [request, *request.group.live]
    return [request, *request.children] if isinstance(request, Counted) else [request]
