"""Which hidden states a draft reads, by the numbers of its layout; and drafts that do not fit, or are no drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.errors import CheckpointError, LlmcError, OptionError
from llmc.frontends.capture import capture
from llmc.frontends.drafts.draft_engine import draft_options, target_ids
from llmc.frontends.drafts.eagle3 import Eagle3Checkpoint
from llmc.frontends.drafts.open_draft import open_draft
from llmc.graph.model_graph import ModelInfo
from llmc.options import BuildOptions, parse_options
from llmc.passes.pipeline import canonical, default, essential, speculative
from llmc.passes.runner import run_pipeline
from llmc.program import Limits
from tests import draft_checkpoints as drafts
from tests.tiny_models import tiny_checkpoint, tiny_model

IDS = "eagle_aux_hidden_state_layer_ids"
SGLANG = {"eagle_config": {IDS: [1, 17, 32]}}


@pytest.mark.parametrize(
    ("settings", "before"),
    [
        pytest.param({}, (2, 18, 33), id="none are named: those of the authors' code"),
        pytest.param({IDS: [2, 18, 33]}, (2, 18, 33), id="vLLM's are before their layers"),
        pytest.param({IDS: [1, 17, 32]}, (1, 17, 32), id="whatever they begin with"),
        pytest.param({IDS: [2, 18, 36]}, (2, 18, 36), id="the last one after all layers"),
        pytest.param(SGLANG, (2, 18, 33), id="SGLang's are after theirs if they begin with 1"),
        pytest.param({"eagle_config": {IDS: [2, 18, 33]}}, (2, 18, 33), id="and before them if not"),
        pytest.param({"eagle_config": {IDS: []}}, (2, 18, 33), id="an empty list names none"),
    ],
)
def test_wrong_taps_cost_all_acceptance_so_numbers_mean_what_their_writers_mean(
    settings: dict[str, Any], before: tuple[int, ...], tmp_path: Path
) -> None:
    """vLLM #50170: 1.2% of the drafts come true instead of 58.9%, and nothing else shows it."""
    draft = open_draft(drafts.eagle3(tmp_path / "draft", **settings))
    assert draft.taps(36, drafts.WIDTH) == before
    assert bool(draft.notes(36)) == (settings == {} or settings == {"eagle_config": {IDS: []}})


def test_speculators_counts_as_vllm_does(tmp_path: Path) -> None:
    named = open_draft(drafts.speculators(tmp_path / "named", eagle_aux_hidden_state_layer_ids=[1, 17, 32]))
    assert named.taps(36, drafts.WIDTH) == (1, 17, 32)
    unnamed = open_draft(drafts.speculators(tmp_path / "unnamed"))
    assert unnamed.taps(36, drafts.WIDTH) == (2, 18, 33) and "before the layers [2, 18, 33]" in unnamed.notes(36)[0]


def attach(model: Path, speculative_: Path | str) -> None:
    captured = capture(model, BuildOptions(speculative=str(speculative_)))
    run_pipeline(captured.graph, (*canonical(), *speculative()), BuildOptions())


def model(directory: Path, **settings: Any) -> Path:
    return tiny_checkpoint("llama", directory / "model", tie_word_embeddings=False, **settings)


def fitting(directory: Path) -> Path:
    """A draft for that model."""
    return drafts.eagle3(directory / "draft", eagle_aux_hidden_state_layer_ids=[0, 1, 2])


def refused(problem: str, directory: Path, draft: Path | str, **settings: Any) -> LlmcError:
    with pytest.raises(LlmcError, match=problem) as caught:
        attach(model(directory, **settings), draft)
    assert caught.value.fix
    return caught.value


def without(draft: Path, name: str) -> Path:
    tensors = load_file(draft / "model.safetensors")
    del tensors[name]
    save_file(tensors, draft / "model.safetensors")
    return draft


@pytest.mark.parametrize("ids", [[0, 1, 2], [2, 4, 6]], ids=["of its layers", "of layers that it lacks"])
def test_a_draft_of_a_narrower_model_is_refused_by_its_width(ids: list[int], tmp_path: Path) -> None:
    draft = drafts.eagle3(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=ids)
    problem = r"3 hidden states of 64 \(its fc.weight is \[64, 192\]\), those of this model have 96"
    error = refused(problem, tmp_path, draft, hidden_size=96)
    assert "trained for this model" in str(error.fix)


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    draft = fitting(tmp_path)
    refused(r"160 tokens \(t2d\), model has 200", tmp_path, draft, vocab_size=200)


def test_a_draft_for_more_layers_is_refused(tmp_path: Path) -> None:
    problem = r"before the layers \[2, 1, -1\] do not exist in a model of 2"
    error = refused(problem, tmp_path, drafts.eagle3(tmp_path / "d"))
    assert "a draft that was trained for this model" in str(error.fix)


def cut_short(draft: Path) -> Path:
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    return draft


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nothing", "the draft's directory does not exist"),
        ("heads.pt", "pickle"),
        ("nothing.safetensors", "no Medusa heads"),
        ("cut", "truncated|header|short"),
    ],
)
def test_a_draft_is_looked_at_before_the_model_is_captured(path: str, problem: str, tmp_path: Path) -> None:
    """Both are wrong here, and the draft is named."""
    (tmp_path / "heads.pt").write_bytes(b"\x80\x02.")
    cut_short(drafts.eagle3(tmp_path / "cut"))
    with pytest.raises(LlmcError, match=problem) as caught:
        capture(tmp_path / "no model", BuildOptions(speculative=str(tmp_path / path)))
    assert caught.value.fix


@pytest.mark.parametrize(
    "name", ["fc.weight", "norm.weight", "midlayer.mlp.up_proj.weight", "midlayer.hidden_norm.weight"]
)
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    draft = without(fitting(tmp_path), name)
    refused(
        "these tensors are not those of known draft layers" if name == "fc.weight" else f"no tensor '{name}'",
        tmp_path,
        draft,
    )


def test_an_output_matrix_without_its_tokens_is_refused(tmp_path: Path) -> None:
    draft = without(fitting(tmp_path), "d2t")
    refused("48 rows and no d2t says which of model's 160 tokens", tmp_path, draft)


def test_a_pickle_is_refused_with_what_converts_it(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(drafts.config()))
    (draft / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    error = refused(r"a pickle \(pytorch_model.bin\), which llmc does not open", tmp_path, draft)
    assert "weights_only=True" in str(error.fix)


def test_what_is_no_draft_is_refused_with_what_was_seen(tmp_path: Path) -> None:
    refused("these tensors are not those of known draft layers: lm_head.weight", tmp_path, tmp_path / "model")
    refused("directory does not exist", tmp_path, tmp_path / "nothing")


def test_speculators_has_to_say_what_is_added_to(tmp_path: Path) -> None:
    """Its authors and vLLM take it for different things where it is left out."""
    draft = drafts.speculators(tmp_path / "draft", norm_before_residual=None)
    refused("norm_before_residual is None, not true or false", tmp_path, draft)
    both = drafts.speculators(tmp_path / "both", norm_before_fc=True, fc_norm=True)
    refused("norm_before_fc and fc_norm are both true", tmp_path, both)


def test_another_kind_of_speculator_is_refused(tmp_path: Path) -> None:
    draft = drafts.speculators(tmp_path / "draft", speculators_model_type="dflash")
    refused("'dflash', which llmc has no drafter for", tmp_path, draft)


@pytest.mark.parametrize("tensor", ["mlp.experts.0.up_proj.weight", "mlp.up_proj.weight_scale_inv"])
def test_mtp_layers_of_another_kind_are_refused(tensor: str, tmp_path: Path) -> None:
    """A layer computes nothing but what the model's own layers do: here the model has no experts, and no codes."""
    target = drafts.add_deepseek_mtp(model(tmp_path))
    tensors = load_file(target / "model.safetensors")
    tensors[f"model.layers.2.{tensor}"] = torch.zeros(2, 2)
    save_file(tensors, target / "model.safetensors")
    unread = f"model.layers.2 is not one of 'llama': 1 tensor .* layers.0.{tensor}"
    with pytest.raises(CheckpointError, match=unread):
        attach(target, "mtp")


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        ("mlp.up_proj", r"model.layers.2, here layers.0: .* lacks 1 of the model's 10 tensors: layers.0.mlp.up_proj"),
        ("eh_proj", "these tensors are not those of known draft layers"),
        ("enorm", r"no tensor 'model.layers.2.enorm.weight'"),
        ("shared_head.norm", r"lacks 1 of the model's 10 tensors: norm.weight"),
    ],
)
def test_a_tensor_that_an_mtp_layer_lacks_is_named(tensor: str, problem: str, tmp_path: Path) -> None:
    target = without(drafts.add_deepseek_mtp(model(tmp_path)), f"model.layers.2.{tensor}.weight")
    with pytest.raises(CheckpointError, match=problem):
        attach(target, "mtp")


def test_an_mtp_layer_of_another_width_is_refused(tmp_path: Path) -> None:
    target = drafts.add_deepseek_mtp(model(tmp_path))
    tensors = load_file(target / "model.safetensors")
    save_file(tensors | {"model.layers.2.mlp.up_proj.weight": torch.zeros(8, 64)}, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.layers.2.mlp.up_proj.weight' has shape \[8, 64\]"):
        attach(target, "mtp")


def test_mtp_of_another_model_is_refused(tmp_path: Path) -> None:
    other = drafts.add_qwen_mtp(tiny_checkpoint("llama", tmp_path / "other", tie_word_embeddings=False))
    refused("hidden_size is 64, that of model is 96", tmp_path, other, hidden_size=96)


def test_a_model_in_memory_has_no_layers_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the model is a LlamaForCausalLM"):
        capture(tiny_model("llama"), BuildOptions(speculative="mtp"))


@pytest.mark.parametrize("add", [drafts.add_qwen_mtp, drafts.add_deepseek_mtp])
def test_layers_that_draft_are_not_called_unused(add: Callable[[Path], Path], tmp_path: Path) -> None:
    target = add(model(tmp_path))
    assert not capture(target, BuildOptions(speculative="mtp")).notes
    (note,) = capture(target, BuildOptions()).notes
    assert "tensors of the checkpoint are not used" in note


@pytest.mark.slow
@pytest.mark.parametrize("made", [drafts.eagle3, drafts.speculators])
def test_the_passes_of_a_draft_can_be_cut_anywhere(made: Callable[..., Path], tmp_path: Path) -> None:
    """Each cut is legal, and finished it is an engine's graph."""
    draft = made(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    captured = capture(model(tmp_path), BuildOptions(speculative=str(draft)))
    attached = run_pipeline(captured.graph, (*canonical(), *speculative()), BuildOptions()).graph.draft
    assert attached is not None
    whole = run_pipeline(attached.graph, default(), BuildOptions())
    count = sum(len(record.rewrites) for record in whole.records)
    assert count > 30 and whole.graph.stage.value == "optimized"
    for cut in range(0, count, 9):
        result = run_pipeline(
            attached.graph, default(), BuildOptions(stop_after=cut, finish_cut=True), essential=essential()
        )
        assert result.was_cut and result.graph.stage.value in ("serving", "optimized")
        assert result.graph.sides()["hidden"].meta["val"].shape[1] == drafts.WIDTH


def test_tokens_of_a_draft_are_the_models() -> None:
    info = ModelInfo("model", "llama", 10, None, torch.float32)
    assert target_ids(torch.tensor([0, 2, 5]), info) == b"\0\0\0\0\3\0\0\0\7\0\0\0"
    with pytest.raises(CheckpointError, match="d2t names token 12, and model has 10 tokens"):
        target_ids(torch.tensor([0, 11]), info)
    with pytest.raises(CheckpointError, match="a token twice"):
        target_ids(torch.tensor([1, 0]), info)


def test_a_draft_is_quantized_like_its_model_unless_that_needs_text() -> None:
    limits = Limits(16, 4, 4, 64, 8)
    plain, notes = draft_options(parse_options({"quantize": "w4a8", "speculative": "x"}), limits)
    assert plain.quantize == ("w4a8",) and plain.max_model_len == 64 and plain.speculative is None and not notes
    other, notes = draft_options(parse_options({"quantize": "int4-gptq", "calibration": "text"}), limits)
    assert not other.quantize and "int4-gptq calibrates on text" in notes[0]
    sparse, notes = draft_options(parse_options({"sparsity": "wanda:0.5", "calibration": "text"}), limits)
    assert not sparse.sparsity and sparse.calibration is None and "wanda:0.5 calibrates on text" in notes[0]


def test_both_layouts_are_told_by_what_they_hold(tmp_path: Path) -> None:
    assert isinstance(open_draft(drafts.eagle3(tmp_path / "a")), Eagle3Checkpoint)
    assert open_draft(drafts.add_qwen_mtp(model(tmp_path))).method == "mtp"
