"""What the page at / shows: gauges and counters of this moment, requests in flight, and the latest finished ones."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from llmc.runtime.engine_stats import RequestView
from llmc.runtime.requests.request_output import RequestOutput

if TYPE_CHECKING:
    from llmc.runtime.server.served_model import ServedModel

_REMEMBERED = 240
_SHOWN_REQUESTS = 40
# The fields of EngineStats that are shown as they are, and are added up over replicas.
SUMMED_STATS = ("running", "waiting", "preemptions", "prompt_tokens", "generation_tokens", "steps")


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


def live_view(model: ServedModel, started: float) -> dict[str, Any]:
    """Seconds, tokens and blocks of a served model as JSON; `now` is on the clock of every `at`, and of `started`."""
    stats, manifest = model.engine.stats(), model.engine.engine.manifest
    requests = model.engine.requests()
    limits, drafts = model.engine.engine.limits, stats.speculation
    return {
        "now": time.monotonic(),
        "uptime": time.monotonic() - started,
        "healthy": model.engine.is_healthy(model.stall_seconds),
        "model": {
            "name": model.name,
            "family": manifest.model.family,
            "parameters": manifest.model.parameters,
            "dtype": manifest.model.dtype,
            "target": manifest.target.name,
            "max_model_len": model.max_model_len,
            "max_sequences": limits.max_sequences,
            "max_batch_tokens": limits.max_batch_tokens,
            "block_size": limits.block_size,
        },
        **{name: getattr(stats, name) for name in SUMMED_STATS},
        "blocks": {
            "total": stats.blocks_total,
            "used": stats.blocks_used,
            "cached": stats.blocks_cached,
            "free": stats.blocks_free,
        },
        "prefix_cache": {"queries": stats.prefix_cache_queries, "hits": stats.prefix_cache_hits},
        "snapshots": {} if stats.snapshots is None else asdict(stats.snapshots),
        "drafts": {} if drafts is None else {"tokens": drafts.draft_tokens, "accepted": drafts.accepted_tokens},
        "finished": dict(stats.finished),
        "step_seconds": [record.seconds for record in stats.recent_steps[-60:]],
        "step_tokens": [record.prompt_tokens + record.decode_tokens for record in stats.recent_steps[-60:]],
        "requests": [_request_json(view) for view in requests[:_SHOWN_REQUESTS]],
        "requests_not_shown": max(0, len(requests) - _SHOWN_REQUESTS),
        "latest": [asdict(done) for done in model.metrics.latest.kept()],
    }


def _request_json(view: RequestView) -> dict[str, Any]:
    fields = asdict(view)
    return {"id": fields.pop("request_id"), **fields, "priority": view.priority.value}
