"""The engine's gauges and counters for Prometheus, read when they are scraped; vLLM's names under `llmc:`."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine_stats import EngineStats, SpeculationStats, WindowStats
from llmc.runtime.speculation.acceptance_config import AcceptanceMethod


class EngineCollector(Collector):
    """Collects an engine's stats under the label model_name."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        stats = self._engine.stats()
        for name, text, value in gauges(stats):
            gauge = GaugeMetricFamily(f"llmc:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in counters(stats):
            counter = CounterMetricFamily(f"llmc:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        finished = CounterMetricFamily(
            "llmc:request_success", "Requests by why they ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([self._model, reason], count)
        yield finished
        yield from window_blocks(stats.windows, self._model)
        if stats.rank_restarts:
            yield rank_restarts(stats.rank_restarts, self._model)
        if stats.speculation is not None:
            places = CounterMetricFamily(
                "llmc:spec_decode_num_accepted_tokens_per_pos",
                "Drafts that came true, by their place.",
                labels=["model_name", "position"],
            )
            for position, count in enumerate(stats.speculation.accepted_at):
                places.add_metric([self._model, str(position)], count)
            yield places
            yield acceptance(stats.speculation, self._model)


def rank_restarts(counts: Mapping[int, int], model: str) -> Metric:
    """Of an engine of several ranks."""
    found = CounterMetricFamily(
        "llmc:rank_restarts", "How often a rank was lost and started again.", labels=["model_name", "rank"]
    )
    for rank, count in counts.items():
        found.add_metric([model, str(rank)], count)
    return found


def window_blocks(windows: Sequence[WindowStats], model: str) -> Iterable[Metric]:
    """Of layers that do not see everything; nothing of a model without such."""
    figures = (
        ("kv_cache_window_blocks", "KV blocks of layers with a window.", [window.total for window in windows]),
        ("kv_cache_window_blocks_used", "Those of them in use.", [window.used for window in windows]),
    )
    for name, text, values in figures if windows else ():
        family = GaugeMetricFamily(f"llmc:{name}", text, labels=["model_name", "reach"])
        for window, value in zip(windows, values, strict=True):
            family.add_metric([model, window.reach], value)
        yield family


def acceptance(stats: SpeculationStats, model: str) -> Metric:
    """Which drafts count, and whether that changes what answers are likely."""
    found = GaugeMetricFamily(
        "llmc:spec_decode_acceptance",
        "How drafts are accepted; a lossy method changes what answers are likely.",
        labels=["model_name", "method", "lossy"],
    )
    is_lossy = stats.acceptance == AcceptanceMethod.TYPICAL.value
    found.add_metric([model, stats.acceptance, str(is_lossy).lower()], 1)
    return found


def gauges(stats: EngineStats) -> list[tuple[str, str, float]]:
    """Name, description and value of each gauge."""
    found: list[tuple[str, str, float]] = [
        ("num_requests_running", "Sequences that hold KV blocks.", stats.running),
        ("num_requests_waiting", "Sequences that wait for their first step.", stats.waiting),
        ("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", stats.cache_usage),
        ("kv_cache_blocks", "KV blocks.", stats.blocks_total),
        ("kv_cache_blocks_cached", "KV blocks that only the prefix cache holds.", stats.blocks_cached),
    ]
    if stats.snapshots is not None:
        found.append(("state_snapshots", "Snapshots of states that there is room for.", stats.snapshots.total))
        found.append(("state_snapshots_used", "Snapshots of states that prefixes have.", stats.snapshots.used))
    if stats.output_cache is not None:
        found.append(("output_cache_bytes", "Bytes that the cache of outputs holds.", stats.output_cache.bytes))
        found.append(("output_cache_entries", "Outputs in the cache of outputs.", stats.output_cache.entries))
    return found


def counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    """Name, description and value of each counter."""
    found: list[tuple[str, str, float]] = [
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
        ("num_preemptions", "Sequences that had to give their blocks back.", stats.preemptions),
        ("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("engine_steps", "Steps of the engine.", stats.steps),
    ]
    if stats.output_cache is not None:
        found.append(("output_cache_queries", "Requests looked up in the cache.", stats.output_cache.queries))
        found.append(("output_cache_hits", "Requests answered from the cache.", stats.output_cache.hits))
    if stats.speculation is not None:
        found.append(("spec_decode_num_drafts", "Proposals of one or more tokens.", stats.speculation.drafts))
        found.append(("spec_decode_num_draft_tokens", "Tokens drafted.", stats.speculation.draft_tokens))
        accepted = stats.speculation.accepted_tokens
        found.append(("spec_decode_num_accepted_tokens", "Drafts that came true.", accepted))
    return found
