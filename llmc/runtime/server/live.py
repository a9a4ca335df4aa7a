"""What the page at / shows: gauges and counters of this moment, requests in flight, and the latest finished ones."""

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine_stats import RequestView
from llmc.runtime.requests.request_output import RequestOutput

_REMEMBERED = 240
_SHOWN_REQUESTS = 40


@dataclass(frozen=True)
class Finished:
    """A finished request: seconds to the first token, a later token and the end; None for what it never had."""

    at: float
    first_token: float | None
    per_token: float | None
    total: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class LatestRequests:
    """The latest finished requests, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[Finished] = deque(maxlen=_REMEMBERED)

    def add(self, output: RequestOutput) -> None:
        """Note a request's last output."""
        times, usage = output.times, output.usage
        if times.finished is None:
            return
        first, per_token = None, None
        if times.first_token is not None:
            first = times.first_token - times.arrived
            if usage.completion_tokens > 1:
                per_token = (times.finished - times.first_token) / (usage.completion_tokens - 1)
        self._kept.append(
            Finished(
                times.finished,
                first,
                per_token,
                times.finished - times.arrived,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
            )
        )

    def kept(self) -> tuple[Finished, ...]:
        """Those remembered."""
        return tuple(self._kept)


class LiveView:
    """Snapshots of one engine as JSON. stall_seconds: a step that takes longer makes it unhealthy."""

    def __init__(
        self, engine: AsyncEngine, latest: LatestRequests, name: str, max_model_len: int, stall_seconds: float
    ) -> None:
        self._engine = engine
        self._latest = latest
        self._name = name
        self._max_model_len = max_model_len
        self._stall_seconds = stall_seconds
        self._started = time.monotonic()

    def snapshot(self) -> dict[str, Any]:
        """Seconds, tokens and blocks; `now` is on the clock of every `at`."""
        stats, manifest = self._engine.stats(), self._engine.engine.manifest
        requests = self._engine.requests()
        limits, drafts = self._engine.engine.limits, stats.speculation
        return {
            "now": time.monotonic(),
            "uptime": time.monotonic() - self._started,
            "healthy": self._engine.is_healthy(self._stall_seconds),
            "model": {
                "name": self._name,
                "family": manifest.model.family,
                "parameters": manifest.model.parameters,
                "dtype": manifest.model.dtype,
                "target": manifest.target.name,
                "max_model_len": self._max_model_len,
                "max_sequences": limits.max_sequences,
                "max_batch_tokens": limits.max_batch_tokens,
                "block_size": limits.block_size,
            },
            "running": stats.running,
            "waiting": stats.waiting,
            "blocks": {
                "total": stats.blocks_total,
                "used": stats.blocks_used,
                "cached": stats.blocks_cached,
                "free": stats.blocks_free,
            },
            "prefix_cache": {"queries": stats.prefix_cache_queries, "hits": stats.prefix_cache_hits},
            "snapshots": {} if stats.snapshots is None else asdict(stats.snapshots),
            "drafts": {} if drafts is None else {"tokens": drafts.draft_tokens, "accepted": drafts.accepted_tokens},
            "preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "steps": stats.steps,
            "finished": dict(stats.finished),
            "step_seconds": [record.seconds for record in stats.recent_steps[-60:]],
            "step_tokens": [record.prompt_tokens + record.decode_tokens for record in stats.recent_steps[-60:]],
            "requests": [_request_json(view) for view in requests[:_SHOWN_REQUESTS]],
            "requests_not_shown": max(0, len(requests) - _SHOWN_REQUESTS),
            "latest": [asdict(done) for done in self._latest.kept()],
        }


def _request_json(view: RequestView) -> dict[str, Any]:
    return {
        "id": view.request_id,
        "priority": view.priority.value,
        "state": view.state,
        "seconds": view.seconds,
        "prompt_tokens": view.prompt_tokens,
        "computed_tokens": view.computed_tokens,
        "output_tokens": view.output_tokens,
        "blocks": view.blocks,
    }
