"""Answers that must not depend on what an engine does besides: chunks, threads, drafts, a cold prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import llmc

OTHERS: tuple[Mapping[str, Any], ...] = (
    {"max_step_tokens": 5, "threads": 2, "prefix_cache": False},
    {"speculation": {"method": "lookahead"}},
    {"speculation": {"method": "ngram", "num_speculative_tokens": 4}},
)


def assert_alike(path: Path, answers: Callable[[llmc.Engine], object], expected: object) -> None:
    """Load the engine with other options, one set after the other, and compare its answers."""
    for options in OTHERS:
        with llmc.load(path, **options) as engine:
            assert answers(engine) == expected, options


def least_cache_bytes(path: Path) -> int:
    """The smallest KV cache that the engine accepts. Requests then preempt each other."""
    with pytest.raises(llmc.LlmcError, match="one sequence of max_model_len") as caught:
        llmc.load(path, kv_cache_bytes=1)
    return int(caught.value.problem.rsplit(" ", 1)[-1])
