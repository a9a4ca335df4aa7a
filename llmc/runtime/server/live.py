"""The page at /: current gauges and counters, requests in flight, and the latest finished ones."""

import time
from dataclasses import asdict
from typing import Any

from llmc.runtime.engine_stats import RequestView
from llmc.runtime.server.served_model import ServedModel

_SHOWN_REQUESTS = 40
# The fields of EngineStats that are shown as they are, and are added up over replicas.
SUMMED_STATS = ("running", "waiting", "preemptions", "prompt_tokens", "generation_tokens", "steps")


def live_view(model: ServedModel, started: float) -> dict[str, Any]:
    """Seconds, tokens and blocks of a served model as JSON; `now` is on the clock of every `at`, and of `started`."""
    stats, manifest = model.engine.stats(), model.engine.engine.manifest
    groups = stats.groups
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
        "rows": {"kept": sum(group.kept for group in groups), "evicted": sum(group.dropped for group in groups)},
        "snapshots": {} if stats.snapshots is None else asdict(stats.snapshots),
        "offload": {} if stats.offload is None else asdict(stats.offload),
        "drafts": {} if drafts is None else {"tokens": drafts.draft_tokens, "accepted": drafts.accepted_tokens},
        "finished": dict(stats.finished),
        "step_seconds": [record.seconds for record in stats.recent_steps[-60:]],
        "step_tokens": [record.prompt_tokens + record.decode_tokens for record in stats.recent_steps[-60:]],
        "requests": [_request_json(view) for view in requests[:_SHOWN_REQUESTS]],
        "requests_not_shown": max(0, len(requests) - _SHOWN_REQUESTS),
        "latest": [asdict(done) for done in model.metrics.latest],
    }


def _request_json(view: RequestView) -> dict[str, Any]:
    fields = asdict(view)
    return {"id": fields.pop("request_id"), **fields, "priority": view.priority.value}
