"""What the debugging verbs say of a build that makes zeros or takes parts of the model out."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.command import assert_user_error, llmc
from tests.passes.pruning.pruned_models import calibration
from tests.tiny_models import tiny_checkpoint

PRUNE = "channels=0.25,heads=0.5,layers=1"
ZEROED = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return calibration(tmp_path_factory.mktemp("text"))


@pytest.mark.slow
def test_explain_says_what_became_of_each_weight(model: Path, text: str) -> None:
    zeros = llmc("explain", model, "--sparsity", "wanda:0.5", "--calibration", text)
    assert zeros.code == 0, zeros.err
    assert "sparsify: 14 rewrites" in zeros.out and "store_sparse: 8 rewrites" in zeros.out
    assert "lm_head decides on every token: it stays dense unless a rule names it" in zeros.out
    heads = llmc("explain", model, "--prune", PRUNE, "--calibration", text, "--pass", "prune_heads")
    assert heads.code == 0, heads.err
    assert "1 of 2 KV heads of model.layers.0.self_attn.o_proj" in heads.out


@pytest.mark.slow
def test_explain_of_a_pass_that_fails_says_why(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[ZEROED].zero_()
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    outcome = llmc("explain", tmp_path, "--sparsity", "magnitude:0.5", "--pass", "sparsify")
    assert_user_error(outcome, ZEROED, "holds nothing but zeros")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "passes"),
    [(["--sparsity", "magnitude:0.5"], ["sparsify"]), (["--prune", PRUNE], ["drop_layers", "prune_heads"])],
)
def test_diff_shows_which_passes_change_numbers(model: Path, text: str, given: list[str], passes: list[str]) -> None:
    """A random model has no redundance: half of it changes its logits by more than the passes' budgets."""
    outcome = llmc("diff", model, *given, "--calibration", text)
    assert outcome.code == 1, outcome.err
    over = [line.split("│")[2].strip() for line in outcome.out.splitlines() if line.startswith("│ ✗")]
    assert over and set(over) <= set(passes)
    assert f"✗ {passes[0]} is the first pass over its budget" in outcome.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "rewrite"),
    [
        (["--sparsity", "magnitude:0.5"], "of pass sparsify: model.layers.0.self_attn.q_proj to magnitude:0.5"),
        (["--prune", PRUNE], "of pass drop_layers"),
    ],
)
def test_bisect_finds_the_first_rewrite_that_changes_numbers(
    model: Path, text: str, given: list[str], rewrite: str, tmp_path: Path
) -> None:
    outcome = llmc("bisect", model, *given, "--calibration", text, "--output", tmp_path / "found")
    assert outcome.code == 0, outcome.err
    assert rewrite in outcome.out and (tmp_path / "found" / "repro.py").exists()


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("store_sparse", "read off the data of weights"),
        ("sparsify", "lossy"),
        ("drop_layers", "lossy"),
        ("prune_heads", "lossy"),
        ("low_rank_values", "lossy"),
        ("prune_channels", "lossy"),
    ],
)
def test_prove_says_why_it_leaves_them_out(name: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    outcome = llmc("prove", name)
    assert outcome.code == 0 and verdict in outcome.out
