"""What sets two engines apart."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import llmc
from llmc.cli.diff import print_engines
from llmc.debug.engine_diff import diff_engines
from llmc.debug.sample_tokens import Sample
from llmc.errors import EngineFormatError
from tests.tiny_models import tiny_checkpoint


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A reference engine, one with an option and a pass less, and one of another vocabulary."""
    directory = tmp_path_factory.mktemp("engines")
    model = tiny_checkpoint("llama", directory / "model", num_hidden_layers=1)
    wanted: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (model, {}),
        "other": (model, {"disable_passes": ("merge_qkv",), "block_size": 32}),
        "vocabulary": (tiny_checkpoint("llama", directory / "small", num_hidden_layers=1, vocab_size=128), {}),
    }
    for name, (source, options) in wanted.items():
        llmc.build(source, directory / name, target="reference", max_model_len=64, **options)
    return {name: directory / name for name in wanted}


def test_an_engine_does_not_differ_from_itself(engines: dict[str, Path]) -> None:
    difference = diff_engines(engines["plain"], engines["plain"])
    assert difference.changes == ()
    assert (
        difference.logits is not None
        and difference.logits.max_difference == 0.0
        and difference.logits.top1_agreement == 1.0
    )


def test_options_passes_graphs_weights_and_logits_are_compared(engines: dict[str, Path]) -> None:
    difference = diff_engines(engines["plain"], engines["other"], Sample(tokens="5,6,7,8,9"))
    changes = {(c.section, c.name): (c.first, c.second) for c in difference.changes}
    assert changes["option", "block_size"] == ("16", "32")
    assert changes["pass", "merge_qkv"] == ("1 rewrite, 0 refused", None)
    assert ("graph", "merge_qkv") in changes and ("graph", "fuse_rope") not in changes
    assert ("weight", "model_layers_0_self_attn_q_k_v_proj_weight") in changes
    assert difference.tokens == (5, 6, 7, 8, 9)
    assert difference.logits is not None and 0 <= difference.logits.relative_difference < 1e-4


def test_what_differs_is_one_screen(engines: dict[str, Path]) -> None:
    difference = diff_engines(engines["plain"], engines["other"], Sample(tokens="5,6,7,8,9"))
    console = Console(record=True, width=200, file=StringIO())
    print_engines(console, Path("a.llmc"), Path("b.llmc"), difference)
    shown = console.export_text()
    assert len(shown.splitlines()) <= 30 and "--all" in shown and "logits on 5 tokens" in shown
    print_engines(console, Path("a.llmc"), Path("b.llmc"), difference, everything=True)
    assert all(change.name in console.export_text(clear=False) for change in difference.changes)


def test_logits_of_other_vocabularies_are_not_compared(engines: dict[str, Path]) -> None:
    difference = diff_engines(engines["plain"], engines["vocabulary"])
    assert difference.logits is None and difference.why_not == "their vocabularies have 160 and 128 tokens"
    assert ("model", "vocab_size") in {(c.section, c.name) for c in difference.changes}


def test_what_is_no_engine(engines: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(EngineFormatError, match="there is no such engine"):
        diff_engines(engines["plain"], tmp_path / "none.llmc")
