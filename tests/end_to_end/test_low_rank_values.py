"""Engines whose values have fewer channels than their keys: answers, caches in every format, and the build's record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.engine_format.reader import read_engine, read_pruning
from tests.end_to_end.logits import assert_close
from tests.passes.pruning.pruned_models import calibration
from tests.tiny_models import tiny_checkpoint, tiny_tokens

TOKENS = tiny_tokens(60)
LIMITS: dict[str, Any] = {"max_batch_tokens": 64, "max_sequences": 2, "max_model_len": 128, "block_size": 8}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """An engine with these options, built once."""
    folder = tmp_path_factory.mktemp("values")
    model, text = tiny_checkpoint("llama", folder / "model"), calibration(folder)

    def engine(**options: Any) -> Path:
        path = folder / ("-".join(str(value).replace(":", "_") for value in options.values()) + ".llmc")
        if not path.exists():
            given = {"prune": "value_rank=6", "calibration": text, "calibration_length": 64, **LIMITS, **options}
            llmc.build(model, path, dtype="float32", **given)
        return path

    return engine


def test_a_cpu_says_what_the_graph_says(built: Callable[..., Path]) -> None:
    with llmc.load(built(target="reference")) as reference:
        expected = reference.logits(TOKENS)
    path = built(target="cpu")
    for chunk in (5, None):
        with llmc.load(path, threads=1, max_step_tokens=chunk) as engine:
            assert_close(engine.logits(TOKENS), expected)
    engine_files = read_engine(path)
    assert {(cache.head_dim, cache.value_dim) for cache in engine_files.program.caches} == {(16, 6)}
    parts = read_pruning(engine_files.files)
    assert [(part.kind, part.of, len(part.removed)) for part in parts] == [("values", 16, 10)] * 2
    assert all(0.0 < part.error < 1.0 for part in parts)


# Of the mean error of logits over their spread, which the codes alone cause.
CODES = {"int8": 0.03, "int8:rotated": 0.03, "fp8": 0.08, "int4:head": 0.15}


@pytest.mark.parametrize("format", CODES)
def test_caches_of_codes_hold_fewer_values(format: str, built: Callable[..., Path]) -> None:
    with llmc.load(built(target="cpu"), threads=1) as engine:
        expected = engine.logits(TOKENS)
    with llmc.load(built(target="cpu", kv_cache=format), threads=1) as engine:
        actual = engine.logits(TOKENS)
    assert np.abs(actual - expected).mean() < CODES[format] * expected.std()


@pytest.mark.parametrize("text", ["stride:step=3,recent=16,rows=8", "h2o:budget=48,every=16,sinks=2,recent=16"])
def test_rows_with_fewer_values_are_moved(text: str, built: Callable[..., Path]) -> None:
    """Policies that drop rows copy the channels that are left: chunks change no token."""
    answers = []
    for chunk in (5, None):
        with llmc.load(built(target="cpu", kv_compression=text), threads=1, max_step_tokens=chunk) as engine:
            (answer,) = engine.generate([TOKENS], max_tokens=40, ignore_eos=True)
            assert engine.loop.groups[0].stats.dropped
            answers.append(answer.choices[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_interpreted_kernels_say_what_the_graph_says(built: Callable[..., Path]) -> None:
    path = built(target="h100")
    with llmc.load(path, executor="reference") as reference:
        expected = reference.logits(TOKENS[:20])
    with llmc.load(path, executor="ptx") as engine:
        assert_close(engine.logits(TOKENS[:20]), expected)
