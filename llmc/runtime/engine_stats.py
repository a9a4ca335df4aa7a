"""Statistics of a running engine: counters, gauges, and the latest steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmc.runtime.requests.generation_request import Priority

if TYPE_CHECKING:
    from llmc.runtime.scheduling.step_plan import StepPlan


@dataclass(frozen=True)
class StepRecord:
    """One step: when it ended (time.monotonic()), how long it took, the seconds of it in the executor, and its content.

    prompt_tokens and decode_tokens: computed in it. requests: how many had a part in it.
    """

    ended: float
    seconds: float
    executor_seconds: float
    prompt_tokens: int
    decode_tokens: int
    requests: int

    @staticmethod
    def of(plan: StepPlan, begin: float, ended: float, executor_seconds: float) -> StepRecord:
        return StepRecord(
            ended=ended,
            seconds=ended - begin,
            executor_seconds=executor_seconds,
            prompt_tokens=sum(chunk.tokens for chunk in plan.chunks if not chunk.draft),
            decode_tokens=len(plan.decodes) + sum(chunk.tokens for chunk in plan.chunks if chunk.draft),
            requests=len(plan.decodes) + len(plan.chunks),
        )


@dataclass(frozen=True)
class RequestView:
    """A request in flight, as a live page shows it. state: "running" or "waiting"; seconds: since it arrived."""

    request_id: str
    priority: Priority
    state: str
    seconds: float
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int


@dataclass(frozen=True)
class CacheStats:
    """Statistics of the cache of finished outputs: its size, lookups and hits."""

    entries: int
    bytes: int
    max_bytes: int
    queries: int
    hits: int


@dataclass(frozen=True)
class GroupStats:
    """The blocks of layers that do not keep everything. policy: what they keep, as text. kept, dropped: rows that
    tables held after a cut, and that left them, since the engine was opened."""

    policy: str
    total: int
    used: int
    cached: int
    kept: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class SnapshotStats:
    """Snapshots of recurrent states in the prefix cache: their maximum and current number."""

    total: int
    used: int


@dataclass(frozen=True)
class OffloadStats:
    """The second tier, where blocks go that the pools give away.

    blocks, bytes: what it holds, of at most max_bytes. swapped: requests that wait with their blocks in it. The others
    are counters. hits: tokens that were not computed again. stored_…, loaded_…: what went in and came back.
    dropped_blocks: not kept for lack of room or time, or because the store failed. damaged_blocks: not what was kept.
    """

    max_bytes: int
    bytes: int
    blocks: int
    swapped: int
    hits: int
    stored_blocks: int
    stored_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    dropped_blocks: int
    damaged_blocks: int


@dataclass(frozen=True)
class SpeculationStats:
    """Statistics of speculation. drafts: proposals, of one or more tokens; accepted_at: accepted tokens by place, from
    the first on. acceptance: the rejection_sample_method."""

    drafts: int
    draft_tokens: int
    accepted_at: tuple[int, ...]
    acceptance: str = "invariant"

    @property
    def accepted_tokens(self) -> int:
        """Number of accepted drafts."""
        return sum(self.accepted_at)

    @property
    def tokens_a_step(self) -> float:
        """Mean number of tokens that a request got from a step with drafts; 1 if there were none."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0


@dataclass(frozen=True)
class EngineStats:
    """Gauges of this moment, and counters since the engine was opened.

    running, waiting: sequences (a request with n choices has n). blocks_used + blocks_cached + blocks_free =
    blocks_total; cached blocks hold a prefix that no request uses now, and are reused when needed. groups: the same
    counts for layers that do not keep the whole sequence, which have their own blocks.
    prefix_cache_queries and prefix_cache_hits: in tokens, as vLLM counts them; a hit is a token that need not be
    computed again, also for models with states. snapshots: of a model with states, None for other models. finished:
    requests by finish reason, including "error". recent_steps: the latest steps, oldest first. rank_restarts: number of
    restarts of each rank except the first after it was lost. restarts: number of times the engine was reopened.
    offload: None without a second tier.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    finished: Mapping[str, int]
    recent_steps: tuple[StepRecord, ...]
    output_cache: CacheStats | None = None
    speculation: SpeculationStats | None = None
    rank_restarts: Mapping[int, int] = field(default_factory=dict)
    snapshots: SnapshotStats | None = None
    groups: tuple[GroupStats, ...] = ()
    restarts: int = 0
    offload: OffloadStats | None = None

    @property
    def cache_usage(self) -> float:
        """The largest share of blocks in use over all groups of caches; requests wait for that group."""
        pools = [(self.blocks_used, self.blocks_total), *((group.used, group.total) for group in self.groups)]
        return max(used / total if total else 0.0 for used, total in pools)
