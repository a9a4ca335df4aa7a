"""Engines of pruned models: what they compute, what they cache, and what they say of what went."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmc
from llmc import SamplingParams
from llmc.compiler import build
from llmc.engine_format import read_engine
from llmc.engine_format.reader import read_pruning
from llmc.report.contents import read_contents
from llmc.report.page.weights import pruning_data
from tests.cli.command import llmc as llmc_verb
from tests.end_to_end.logits import GENERATED, assert_close, assert_greedy, random_tokens, torch_logits
from tests.passes.pruning.pruned_models import calibration, without
from tests.tiny_models import tiny_checkpoint, tiny_model

PRUNE = "channels=0.25,heads=0.5,layers=1"


def test_what_went_is_in_the_engine_its_report_and_the_tables(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    report = build(
        model, tmp_path / "e.llmc", target="reference", prune=PRUNE, calibration=calibration(tmp_path), quantize="int8"
    )
    kinds = {part.kind: part for part in report.pruned}
    assert set(kinds) == {"layer", "heads", "channels"} and kinds["layer"].parameters_left == 0
    assert [(cache.kv_heads, cache.head_dim) for cache in report.program.caches] == [(1, 16)]
    directory = read_engine(tmp_path / "e.llmc")
    assert read_pruning(directory.files) == report.pruned
    data = pruning_data(read_contents(directory.files, directory.manifest, directory.program))
    assert [part["parameters_left"] for part in data] == [part.parameters_left for part in report.pruned]
    ends = [run.partition("–")[::2] for run in data[-1]["runs"].split(", ")]
    runs = [number for first, last in ends for number in range(int(first), int(last or first) + 1)]
    assert tuple(runs) == report.pruned[-1].removed and len(runs) == 28
    shown = llmc_verb("inspect", tmp_path / "e.llmc", "--pruning").out
    assert "28 of 112 channels" in shown and "1 of 2 heads" in shown and "the layer" in shown


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_cpu_engine_computes_and_serves_the_smaller_model(family: str, tmp_path: Path) -> None:
    """Prompts in chunks, neighbours and what the prefix cache has are all those of any dense engine."""
    model = tiny_checkpoint(family, tmp_path / "model")
    report = build(
        model,
        tmp_path / "e.llmc",
        target="cpu",
        prune=PRUNE,
        calibration=calibration(tmp_path),
        max_batch_tokens=32,
        max_model_len=300,
    )
    smaller = without(tiny_model(family), report.pruned)
    with llmc.load(tmp_path / "e.llmc") as engine:
        prompt = random_tokens(160, 40)
        assert_close(engine.logits(prompt), torch_logits(smaller, prompt))
        params = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
        both = engine.generate([prompt, prompt[:9]], params)
        assert_greedy(smaller, prompt, list(both[0].token_ids))
        assert list(engine.generate([prompt], params)[0].token_ids) == list(both[0].token_ids)


@pytest.mark.slow
def test_a_gpu_engine_is_compiled_offline(tmp_path: Path) -> None:
    model, text = tiny_checkpoint("llama", tmp_path / "model"), calibration(tmp_path)
    report = build(model, tmp_path / "e.llmc", target="h100", dtype="bfloat16", prune=PRUNE, calibration=text)
    assert report.binaries and [cache.kv_heads for cache in report.program.caches] == [1]
