"""Rotary frequencies that follow the length: an engine has those of the longest sequence that it is built for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llmc.debug.hf_oracle import hf_logits
from llmc.errors import CaptureError, CheckpointError
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.frontends.open_model import open_model
from llmc.frontends.transformers import capture_cache
from llmc.frontends.transformers.capture_cache import capture_entry
from llmc.frontends.transformers.rotary_lengths import hold_frequencies
from llmc.graph.execute import run_tokens
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.settings import read_settings
from tests.frontends.checkpoints import edit_json
from tests.gguf_files import write_gguf
from tests.tiny_models import saved, tiny_model, tiny_tokens

ORIGINAL = 24
SHORT, LONG = [1.0 + 0.05 * i for i in range(8)], [2.0 + i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": SHORT,
    "long_factor": LONG,
}
WITHIN, BEYOND = tiny_tokens(ORIGINAL), tiny_tokens(ORIGINAL + 9)


def longrope_model(family: str, **changes: Any) -> Any:
    rope = {**LONGROPE, **changes}
    more: dict[str, Any] = {"num_hidden_layers": 1, "rope_parameters": rope}
    if family == "phi3":
        more |= {"original_max_position_embeddings": rope["original_max_position_embeddings"], "sliding_window": None}
    if family == "phimoe":
        more["rope_parameters"] = {**rope, "short_mscale": 1.1, "long_mscale": 1.3}
    if family == "gemma3_text":
        more["rope_parameters"] = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
        more |= {"head_dim": 16, "layer_types": ["full_attention"]}
        more["rope_parameters"]["sliding_attention"]["rope_theta"] = 10000.0
    return tiny_model(family, **more)


def logits(captured: Captured, tokens: list[int], options: BuildOptions) -> Tensor:
    """After all passes, in steps of several sizes: positions alone may decide on the angles."""
    graph = run_pipeline(captured.graph, default(), options).graph
    return run_tokens(graph, captured.source, tokens, chunk_sizes=[5, 1, len(tokens) - 6])


def expected(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return result


@pytest.mark.parametrize(
    ("family", "from_files"), [("llama", True), ("phi3", False), ("phimoe", False), ("gemma3_text", True)]
)
def test_short_factors_up_to_the_original_length(family: str, from_files: bool, tmp_path: Path) -> None:
    model, options = longrope_model(family), BuildOptions(max_model_len=ORIGINAL)
    captured = capture(saved(model, tmp_path) if from_files else model, options)
    assert not [note for note in captured.notes if "longrope" in note]
    torch.testing.assert_close(logits(captured, WITHIN, options), expected(model, WITHIN), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "from_files", "longest"),
    [("llama", False, None), ("phi3", True, ORIGINAL + 9), ("gemma3_text", False, None)],
)
def test_long_factors_beyond_it(family: str, from_files: bool, longest: int | None, tmp_path: Path) -> None:
    model, options = longrope_model(family), BuildOptions(max_model_len=longest)
    before = expected(model, WITHIN)
    captured = capture(saved(model, tmp_path) if from_files else model, options)
    assert f"--max-model-len {ORIGINAL}" in " ".join(captured.notes)
    torch.testing.assert_close(logits(captured, BEYOND, options), expected(model, BEYOND), rtol=1e-4, atol=1e-4)
    assert torch.equal(expected(model, WITHIN), before), "the user's model was changed"


def test_phi_moe_has_the_long_factors_and_their_scale() -> None:
    """transformers 5 leaves the short factors in it at any length: the long ones are those of its definition."""
    options = BuildOptions(max_model_len=ORIGINAL + 9)
    actual = logits(capture(longrope_model("phimoe"), options), BEYOND, options)
    long = longrope_model("phimoe", short_factor=LONG)
    torch.testing.assert_close(actual, expected(long, BEYOND), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("changes", "tokens"), [({"attention_factor": 1.5}, BEYOND), ({"factor": None}, WITHIN)])
def test_the_attention_factor_is_that_of_both_sets(changes: dict[str, Any], tokens: list[int]) -> None:
    """A factor that the config names, and the one that transformers makes of the lengths where it names none."""
    model, options = longrope_model("phi3", **changes), BuildOptions(max_model_len=len(tokens))
    actual = logits(capture(model, options), tokens, options)
    torch.testing.assert_close(actual, expected(model, tokens), rtol=1e-4, atol=1e-4)


def test_what_verify_compares_with_has_the_engine_s_factors(tmp_path: Path) -> None:
    directory, options = saved(longrope_model("llama"), tmp_path), BuildOptions()
    ours = logits(capture(directory, options), WITHIN, options)
    np.testing.assert_allclose(hf_logits(directory, longest=len(BEYOND))(WITHIN), ours.numpy(), rtol=1e-4, atol=1e-4)
    assert not np.allclose(hf_logits(directory, longest=ORIGINAL)(WITHIN), ours.numpy(), rtol=1e-2, atol=1e-2)


def test_dynamic_frequencies_are_those_of_the_first_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model("llama", num_hidden_layers=1, rope_parameters=rope, max_position_embeddings=len(BEYOND))
    captured = capture(saved(model, tmp_path), BuildOptions())
    torch.testing.assert_close(logits(captured, BEYOND, BuildOptions()), expected(model, BEYOND), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rope: rope.pop("long_factor"), "long_factor"),
        (lambda rope: rope.update(long_factor=LONG[:-1]), "7"),
        (lambda rope: rope.update(long_factor=[-1.0, *LONG[1:]]), "-1.0"),
        (lambda rope: rope.update(long_factor=[0, *LONG[1:]]), "0 to"),
        (lambda rope: rope.update(long_factor=["x", *LONG[1:]]), "'x'|str"),
        (lambda rope: rope.update(long_factor=3.0), "float"),
        (lambda rope: rope.update(original_max_position_embeddings="24"), "str"),
        (lambda rope: rope.update(original_max_position_embeddings=1), "zero|1"),
    ],
)
def test_factors_that_make_no_frequencies(change: Callable[[Any], Any], said: str, tmp_path: Path) -> None:
    directory = saved(longrope_model("llama"), tmp_path / "model")
    edit_json(directory / "config.json", lambda config: change(config["rope_parameters"]))
    with pytest.raises(CheckpointError, match=said) as caught:
        capture(directory, BuildOptions())
    assert caught.value.fix is not None and "config.json" in str(caught.value.at)


def test_models_without_rotary_positions_have_nothing_to_hold() -> None:
    model = tiny_model("bloom", num_hidden_layers=1)
    assert hold_frequencies(model, model.config, None, "here") == ()


def test_rotary_modules_of_another_make_are_refused() -> None:
    model = longrope_model("llama")
    del model.model.rotary_emb.original_inv_freq
    with pytest.raises(CaptureError, match=r"longrope.*'llama'"):
        hold_frequencies(model, model.config, None, "here")


def test_the_cache_keeps_a_capture_of_each_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings({"LLMC_CAPTURE_CACHE": "always", "LLMC_CACHE_DIR": str(tmp_path / "cache")})
    monkeypatch.setattr(capture_cache, "settings", lambda: settings)
    opened = open_model(saved(longrope_model("llama"), tmp_path / "model"))
    entries = {capture_entry(opened, BuildOptions(max_model_len=length)) for length in (None, ORIGINAL, ORIGINAL + 9)}
    assert len(entries) == 3 and None not in entries
    plain = open_model(saved(tiny_model("llama", num_hidden_layers=1), tmp_path / "plain"))
    assert len({capture_entry(plain, BuildOptions(max_model_len=length)) for length in (None, ORIGINAL)}) == 1


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_factors_of_a_gguf_file(family: str, tmp_path: Path) -> None:
    """As llama.cpp's converter writes them: two tensors, the first length, and the factor of cosines."""
    model, file = longrope_model(family, attention_factor=1.2), tmp_path / "tiny.gguf"

    def add(writer: Any) -> None:
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
        writer.add_rope_scaling_attn_factors(1.2)

    factors = {
        f"rope_factors_{name}.weight": torch.tensor(values) for name, values in (("short", SHORT), ("long", LONG))
    }
    write_gguf(file, model, add=add, extra=factors)
    tokens = WITHIN if family == "llama" else BEYOND
    options = BuildOptions(max_model_len=len(tokens))
    actual = logits(capture(file, options), tokens, options)
    torch.testing.assert_close(actual, expected(model, tokens), rtol=1e-4, atol=1e-4)
    write_gguf(file, model, add=add, extra={"rope_factors_long.weight": torch.tensor(LONG)})
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight is missing"):
        capture(file, BuildOptions())
