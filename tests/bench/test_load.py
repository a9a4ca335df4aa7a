"""Load generation and its summary: seeds, lengths, arrival, quantiles, goals."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from benchmarks.serving_load import Lengths, chat_requests, prefix_requests, static_batches
from llmc.bench.draft_counts import DraftCounts, read_counts
from llmc.bench.load import Arrival
from llmc.bench.prompts import PromptShape, make_requests
from llmc.bench.request_record import RequestRecord
from llmc.bench.summary import parse_goals, summarize
from llmc.errors import OptionError


def test_prompts_follow_their_shape_and_seed() -> None:
    shape = PromptShape(input_len=20, output_len=10, range_ratio=0.5, prefix_len=7, prefix_groups=3)
    requests = make_requests(shape, 30, 500, seed=1)
    assert requests == make_requests(shape, 30, 500, seed=1) != make_requests(shape, 30, 500, seed=2)
    assert all(17 <= len(r.prompt) <= 37 and 5 <= r.output_len <= 15 for r in requests)
    assert all(0 <= token < 500 for r in requests for token in r.prompt)
    prefixes = [r.prompt[:7] for r in requests]
    assert len(set(prefixes)) == 3 and prefixes[0] == prefixes[3] != prefixes[1]
    assert shape.longest == 7 + 30 + 15
    for bad in ({"input_len": 0}, {"range_ratio": 1.0}, {"prefix_groups": 0}):
        with pytest.raises(OptionError):
            PromptShape(**bad)


def test_chat_lengths_are_skewed() -> None:
    requests = chat_requests(Lengths(prompt=48, output=20), 500, 4096, seed=3)
    outputs = [r.output_len for r in requests]
    assert 17 <= statistics.median(outputs) <= 23 and max(outputs) <= 160
    assert statistics.fmean(outputs) > 1.2 * statistics.median(outputs)
    batches = static_batches(requests, 32)
    assert len(batches) == math.ceil(500 / 32) and sum(map(len, batches)) == 500
    same = chat_requests(Lengths(prompt=48, output=20, spread=0.0), 5, 4096, seed=3)
    assert {(len(r.prompt), r.output_len) for r in same} == {(48, 20)}


def test_prefixes_are_shared_and_ends_are_not() -> None:
    first, *rest = prefix_requests(1000, 4, 4096, seed=1)
    assert all(r.prompt[:1000] == first.prompt[:1000] and r.prompt[1000:] != first.prompt[1000:] for r in rest)


def record(sent: float, pieces: list[float], tokens: int, cached: int | None = None) -> RequestRecord:
    return RequestRecord(sent, 10, pieces, tokens, cached, pieces[-1])


@pytest.mark.parametrize("good", [{"concurrency": 1}, {"rate": 0.01}, {"burstiness": 0.01}])
def test_the_least_that_arrivals_may_be(good: dict[str, Any]) -> None:
    Arrival(**good)
    for name in good:
        with pytest.raises(OptionError, match="cannot be 0"):
            Arrival(**{name: 0})


def test_the_summary() -> None:
    records = [
        record(0.0, [0.1, 0.2, 0.3], 3, cached=5),
        record(0.0, [0.3, 0.6], 2, cached=0),
        RequestRecord(0.0, 10, error="HTTP 500"),
    ]
    summary = summarize(records, 2.0, {"ttft": 200.0})
    assert (summary.completed, summary.failed, summary.output_tokens, summary.prompt_tokens) == (2, 1, 5, 20)
    assert summary.output_throughput == 2.5 and summary.request_throughput == 1.0
    assert summary.goodput == 0.5 and summary.prefix_hit_rate == 0.25
    assert summary.latencies["ttft"].mean == pytest.approx(200) and summary.latencies["ttft"].median == pytest.approx(
        200
    )
    assert summary.latencies["tpot"].mean == pytest.approx(200)
    assert summary.latencies["itl"].median == pytest.approx(100)
    assert summary.latencies["e2el"].p99 == pytest.approx(597)
    figures = summary.to_json()
    assert figures["mean_ttft_ms"] == pytest.approx(200) and figures["first_error"] == "HTTP 500"


def test_drafts_are_counted_from_the_metrics_of_whoever_serves() -> None:
    text = (
        "# HELP vllm:spec_decode_num_drafts_total Number.\n"
        'vllm:spec_decode_num_drafts_total{model_name="a",engine="0"} 10.0\n'
        'vllm:spec_decode_num_drafts_total{model_name="b"} 2.0\n'
        'vllm:spec_decode_num_draft_tokens_total{model_name="a"} 1.2e+02\n'
        'vllm:spec_decode_num_accepted_tokens_total{model_name="a"} 30.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="a",position="0"} 9.0\n'
    )
    counts = read_counts(text)
    assert counts == DraftCounts(12, 120, 30)
    assert (counts.acceptance, counts.tokens_a_step) == (0.25, 3.5)
    assert counts.since(DraftCounts(2, 20, 10)) == DraftCounts(10, 100, 20)
    assert read_counts("llmc:num_requests_running 1.0\n") is None
    assert (DraftCounts(0, 0, 0).acceptance, DraftCounts(0, 0, 0).tokens_a_step) == (0.0, 1.0)


def test_goals_and_arrivals_that_cannot_be() -> None:
    assert parse_goals(["ttft:200", "tpot:12.5"]) == {"ttft": 200.0, "tpot": 12.5}
    for bad in ("ttft", "ttft:x", "speed:3", "ttft:-1"):
        with pytest.raises(OptionError, match="goal"):
            parse_goals([bad])
    for values in ({"concurrency": 0}, {"rate": 0.0}, {"burstiness": 0.0}):
        with pytest.raises(OptionError):
            Arrival(**values)
