"""`llmc bench serve | throughput | latency | startup` and `llmc chat`, as a user calls them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.cli.command import assert_user_error, llmc
from tests.runtime.server.conftest import LiveServer

SMALL = ("--input-len", "20", "--output-len", "6")


def test_bench_serve(server: LiveServer, tmp_path: Path) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    goals = ("--goodput", "ttft:60000", "--goodput", "tpot:60000")
    load = ("--num-prompts", "12", "--request-rate", "200", "--max-concurrency", "4", "--prefix-len", "64")
    # More than a few tokens: those that come in one piece have no time between them.
    lengths = ("--input-len", "20", "--output-len", "40")
    outcome = llmc(
        "bench",
        "serve",
        "--base-url",
        server.url,
        *lengths,
        *load,
        *goals,
        "--json",
        figures,
        "--plot",
        plot,
    )
    assert outcome.code == 0, outcome.err
    for part in ("TTFT", "TPOT", "ITL", "E2EL", "p99", "12 in", "within the goals", "prefix cache"):
        assert part in outcome.out, outcome.out
    summary = json.loads(figures.read_text())
    assert summary["completed"] == 12 and summary["failed"] == 0 and summary["output_tokens"] == 480
    assert summary["prompt_tokens"] == 12 * 84 and summary["goodput"] == pytest.approx(summary["request_throughput"])
    assert summary["prefix_hit_rate"] > 0.5 and len(summary["requests"]) == 12
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_serve_says_what_is_wrong(server: LiveServer, tmp_path: Path) -> None:
    assert_user_error(llmc("bench", "serve", "--base-url", "http://127.0.0.1:9"), "no server answers", "llmc serve")
    assert_user_error(
        llmc("bench", "serve", "--base-url", server.url, "--input-len", "512", "--output-len", "1"),
        "up to 513 tokens",
        "512",
    )
    assert_user_error(llmc("bench", "serve", "--base-url", server.url, "--goodput", "x:1"), "goal")
    bad = llmc("bench", "serve", "--base-url", server.url, *SMALL, "--num-prompts", "2", "--model", "gpt-9")
    assert bad.code == 2 and "2 of 2 requests failed" in bad.err and "gpt-9" in bad.err


def test_bench_throughput_and_latency(engine_directory: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    outcome = llmc("bench", "throughput", engine_directory, "--num-prompts", "6", *SMALL, "--json", figures)
    assert outcome.code == 0, outcome.err
    summary = json.loads(figures.read_text())
    assert summary["output_tokens_per_second"] == pytest.approx(36 / summary["seconds"])
    outcome = llmc(
        "bench", "latency", engine_directory, *SMALL, "--iterations", "3", "--warmup", "1", "--json", figures
    )
    assert outcome.code == 0 and "p99" in outcome.out, outcome
    assert len(json.loads(figures.read_text())["seconds"]) == 3
    assert_user_error(llmc("bench", "latency", engine_directory, "--output-len", "4096"), "512")


@pytest.mark.slow
def test_bench_startup(engine_directory: Path) -> None:
    outcome = llmc("bench", "startup", engine_directory, "--iterations", "1")
    assert outcome.code == 0 and "first answer of a server" in outcome.out, outcome


def test_chat_follows_its_commands(engine_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "talk.json"
    lines = ["Good\\", "morrow", "/set temperature 0", "/retry", "/tokens", "/history", "/bogus", "/set top_p 7"]
    lines += ["/system Be brief.", "And thou?", "/undo", f"/save {saved}", "/exit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    outcome = llmc("chat", engine_directory, "--max-tokens", "5", "--seed", "1")
    assert outcome.code == 0, outcome.err
    for part in ("of 512 tokens", "unknown command /bogus", "top_p cannot be 7", "temperature=0"):
        assert part in outcome.out, outcome.out
    talk = json.loads(saved.read_text())
    assert [message["role"] for message in talk] == ["system", "user", "assistant"]
    assert talk[1]["content"] == "Good\nmorrow"


def test_a_conversation_that_is_too_long_can_go_on(engine_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 600 + "\nhi\n"))
    outcome = llmc("chat", engine_directory, "--max-tokens", "3")
    assert outcome.code == 0 and "the message has 612 tokens, the model takes 512" in outcome.out
    assert len(outcome.out.strip().splitlines()) >= 3
