"""The engine's gauges and counters for Prometheus, read when they are scraped; vLLM's names under `llmc:`."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine_stats import EngineStats, SpeculationStats
from llmc.runtime.speculation.acceptance_config import AcceptanceMethod


class EngineCollector(Collector):
    """Collects an engine's stats under the label model_name. stall_seconds: a step that takes longer is stuck."""

    def __init__(self, engine: AsyncEngine, model: str, stall_seconds: float) -> None:
        self._engine = engine
        self._model = model
        self._stall_seconds = stall_seconds

    def collect(self) -> Iterator[Metric]:
        """Yield a family per figure."""
        stats, is_up = self._engine.stats(), float(self._engine.is_healthy(self._stall_seconds))
        yield self._family(GaugeMetricFamily, "engine_up", "Whether the engine is open and not stuck.", [(is_up,)])
        for name, text, value in gauges(stats):
            yield self._family(GaugeMetricFamily, name, text, [(value,)])
        for name, text, value in counters(stats):
            yield self._family(CounterMetricFamily, name, text, [(value,)])
        finished, text = sorted(stats.finished.items()), "Requests by why they ended."
        yield self._family(CounterMetricFamily, "request_success", text, finished, "finished_reason")
        if stats.groups:
            total = [(group.policy, group.total) for group in stats.groups]
            used = [(group.policy, group.used) for group in stats.groups]
            text = "KV blocks of layers that do not keep everything."
            yield self._family(GaugeMetricFamily, "kv_cache_group_blocks", text, total, "policy")
            yield self._family(GaugeMetricFamily, "kv_cache_group_blocks_used", "The ones in use.", used, "policy")
            kept = [(group.policy, group.kept) for group in stats.groups]
            dropped = [(group.policy, group.dropped) for group in stats.groups]
            text = "Rows that tables held after a cut."
            yield self._family(CounterMetricFamily, "kv_cache_kept_rows", text, kept, "policy")
            text = "Rows that a cut has taken from tables."
            yield self._family(CounterMetricFamily, "kv_cache_evicted_rows", text, dropped, "policy")
        if stats.rank_restarts:
            restarts = [(str(rank), count) for rank, count in stats.rank_restarts.items()]
            text = "How often a rank was lost and started again."
            yield self._family(CounterMetricFamily, "rank_restarts", text, restarts, "rank")
        if stats.speculation is not None:
            yield from self._drafts(stats.speculation)

    def _drafts(self, stats: SpeculationStats) -> Iterator[Metric]:
        """Yield the drafts and accepted drafts by place, and whether acceptance changes the distribution of answers."""
        places = [(str(position), count) for position, count in enumerate(stats.accepted_at)]
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts, by their place."
        yield self._family(CounterMetricFamily, name, text, places, "position")
        is_lossy = stats.acceptance == AcceptanceMethod.TYPICAL.value
        method = [(stats.acceptance, str(is_lossy).lower(), 1)]
        text = "How drafts are accepted; a lossy method changes what answers are likely."
        yield self._family(GaugeMetricFamily, "spec_decode_acceptance", text, method, "method", "lossy")

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        samples: Iterable[tuple[*tuple[str, ...], float]],
        *labels: str,
    ) -> Metric:
        """samples: what each label says, and the value."""
        family = kind(f"llmc:{name}", text, labels=["model_name", *labels])
        for *values, number in samples:
            family.add_metric([self._model, *values], number)
        return family


def gauges(stats: EngineStats) -> list[tuple[str, str, float]]:
    """Name, description and value of each gauge."""
    samples: list[tuple[str, str, float]] = [
        ("num_requests_running", "Sequences that hold KV blocks.", stats.running),
        ("num_requests_waiting", "Sequences that wait for their first step.", stats.waiting),
        ("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", stats.cache_usage),
        ("kv_cache_blocks", "KV blocks.", stats.blocks_total),
        ("kv_cache_blocks_cached", "KV blocks that only the prefix cache holds.", stats.blocks_cached),
    ]
    if stats.snapshots is not None:
        samples.append(("state_snapshots", "Snapshots of states that there is room for.", stats.snapshots.total))
        samples.append(("state_snapshots_used", "Snapshots of states that prefixes have.", stats.snapshots.used))
    if stats.offload is not None:
        samples += [
            ("kv_offload_max_bytes", "Bytes that the second tier may hold.", stats.offload.max_bytes),
            ("kv_offload_bytes", "Bytes that the second tier holds.", stats.offload.bytes),
            ("kv_offload_blocks", "KV blocks in the second tier.", stats.offload.blocks),
            ("kv_offload_requests", "Sequences that wait with their blocks in the second tier.", stats.offload.swapped),
        ]
    if stats.output_cache is not None:
        samples.append(("output_cache_bytes", "Bytes that the cache of outputs holds.", stats.output_cache.bytes))
        samples.append(("output_cache_entries", "Outputs in the cache of outputs.", stats.output_cache.entries))
    return samples


def counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    """Name, description and value of each counter."""
    samples: list[tuple[str, str, float]] = [
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
        ("num_preemptions", "Sequences that had to give their blocks back.", stats.preemptions),
        ("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("engine_steps", "Steps of the engine.", stats.steps),
        ("engine_restarts", "Number of times that the engine was reopened after a failed step.", stats.restarts),
    ]
    if stats.offload is not None:
        samples += [
            ("kv_offload_hits", "Tokens that came from the second tier.", stats.offload.hits),
            ("kv_offload_stored_blocks", "KV blocks that went to the second tier.", stats.offload.stored_blocks),
            ("kv_offload_stored_bytes", "Bytes that went to the second tier.", stats.offload.stored_bytes),
            ("kv_offload_loaded_blocks", "KV blocks that came back from there.", stats.offload.loaded_blocks),
            ("kv_offload_loaded_bytes", "Bytes that came back from there.", stats.offload.loaded_bytes),
            ("kv_offload_dropped_blocks", "KV blocks that it did not keep.", stats.offload.dropped_blocks),
            ("kv_offload_damaged_blocks", "KV blocks that were not what it had kept.", stats.offload.damaged_blocks),
        ]
    if stats.output_cache is not None:
        samples.append(("output_cache_queries", "Requests looked up in the cache.", stats.output_cache.queries))
        samples.append(("output_cache_hits", "Requests answered from the cache.", stats.output_cache.hits))
    if stats.speculation is not None:
        samples.append(("spec_decode_num_drafts", "Proposals of one or more tokens.", stats.speculation.drafts))
        samples.append(("spec_decode_num_draft_tokens", "Tokens drafted.", stats.speculation.draft_tokens))
        accepted = stats.speculation.accepted_tokens
        samples.append(("spec_decode_num_accepted_tokens", "Accepted drafts.", accepted))
    return samples
