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
    """Statistics of the blocks of a group of layers that does not keep all rows.

    Args:
        policy: The cache policy of the build as text. Requests may have others.
        total: Blocks of the group's pool.
        used: Blocks that requests or the prefix cache hold.
        cached: Blocks that only the prefix cache holds.
        kept: Rows that compactions kept, since the engine was opened.
        dropped: Rows that compactions dropped, since the engine was opened.
    """

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
    """Statistics of the second tier, which keeps blocks that the pools evict. All but the first four are counters.

    Args:
        max_bytes: Limit of `bytes`.
        bytes: Bytes that the tier holds.
        blocks: Blocks that the tier holds.
        swapped: Waiting requests whose blocks are in the tier.
        hits: Tokens whose rows were loaded instead of computed.
        stored_blocks: Blocks written to the tier.
        stored_bytes: Bytes written to the tier.
        loaded_blocks: Blocks read back.
        loaded_bytes: Bytes read back.
        dropped_blocks: Blocks not kept for lack of space or time, or because the store failed.
        damaged_blocks: Blocks whose content was not what had been stored.
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
    computed again, also for models with states. snapshots: the snapshots of states; None for models without states.
    finished: requests by finish reason, including "error". recent_steps: the latest steps, oldest first. rank_restarts:
    number of restarts of each rank except the first after it was lost. restarts: number of times the engine was
    reopened. offload: None without a second tier.
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
