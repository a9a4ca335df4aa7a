"""Capture of transformers models: every family equals eager, from a directory and from memory; bad input is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from llmc.errors import CaptureError, CheckpointError
from llmc.files.tokenizer_files import name_of
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.graph.verify import verify
from llmc.graph.weights import Constant, Stored
from llmc.options import BuildOptions
from tests.family_captures import FamilyCaptures
from tests.frontends.checkpoints import edit_json, edit_weights, split_into_shards
from tests.frontends.graph_execution import run_captured
from tests.quick_sample import quick_sample
from tests.tiny_models import FAMILIES, tiny_checkpoint, tiny_model, tiny_tokens

# One token, fewer than the window of windowed families, and more.
LENGTHS = (1, 5, 19)


def attentions(graph: ModelGraph) -> list[tuple[Any, ...]]:
    """Scale, window and softcap of each attention."""
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
    return [(*node.args[3:], None, None)[:3] for node in nodes]


def assert_equals_eager(captured: Captured, model: Any) -> None:
    """The graph's logits are the model's, in fp32, at several lengths."""
    for length in LENGTHS:
        tokens = tiny_tokens(length)
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0]
        assert expected.std() > 0.5
        torch.testing.assert_close(run_captured(captured, tokens), expected, atol=1e-4, rtol=0)


# Engines of all of them are compared with Hugging Face in end_to_end/test_families.py.
QUICK = ("llama", "gemma2", "gpt2", "cohere")


@pytest.mark.parametrize("family", quick_sample(FAMILIES, QUICK))
def test_directory_equals_eager(family: str, captured_family: FamilyCaptures) -> None:
    made = captured_family(family)
    graph = made.captured.graph
    assert graph.stage is Stage.CAPTURED
    assert [node.name for node in graph.inputs()] == ["input_ids", "positions"]
    assert len(attentions(graph)) == 2
    assert (graph.info.family, graph.info.vocab_size, graph.info.max_positions) == (family, 160, 320)
    assert graph.info.dtype == torch.float32
    assert_equals_eager(made.captured, made.model)


@pytest.mark.parametrize("family", quick_sample(["llama", "gemma2", "gpt2"], ["gemma2"]))
def test_model_in_memory_equals_eager_and_is_left_alone(family: str) -> None:
    model = tiny_model(family).train()
    before = (model.config.to_dict(), model.config._attn_implementation, list(model.state_dict()))
    captured = capture(model, BuildOptions())
    assert (model.config.to_dict(), model.config._attn_implementation, list(model.state_dict())) == before
    assert model.training
    assert_equals_eager(captured, model.eval())


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_one_placeholder(tied: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    for source in (tmp_path, model):
        captured = capture(source, BuildOptions())
        recipes = [r for r in captured.graph.weights.values() if isinstance(r, Stored)]
        tables = {r.name for r in recipes if r.name in ("model.embed_tokens.weight", "lm_head.weight")}
        assert len(tables) == (1 if tied else 2)
        assert len({r.name for r in recipes}) == len(recipes)
        assert_equals_eager(captured, model)


def test_windows_softcap_and_scale_are_passed_on(captured_family: FamilyCaptures) -> None:
    gemma2 = captured_family("gemma2").captured.graph
    assert attentions(gemma2) == [(20**-0.5, 6, 50.0), (20**-0.5, None, 50.0)]
    granite = captured_family("granite").captured.graph
    assert attentions(granite) == [(0.2, None, None)] * 2


def test_sinks_are_passed_on() -> None:
    model = tiny_model("gpt_oss", num_hidden_layers=1)
    captured = capture(model, BuildOptions())
    nodes = captured.graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
    assert [node.args[6].name for node in nodes] == ["model_layers_0_self_attn_sinks"]
    tokens = tiny_tokens(19)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(run_captured(captured, tokens), expected, atol=1e-4, rtol=0)


def test_weights_are_named_by_the_checkpoint_and_computed_buffers_are_constants(tmp_path: Path) -> None:
    graph = capture(tiny_checkpoint("llama", tmp_path, num_hidden_layers=1), BuildOptions(dtype="bfloat16")).graph
    q = "model.layers.0.self_attn.q_proj.weight"
    assert graph.weights["model_layers_0_self_attn_q_proj_weight"] == Stored(q, torch.bfloat16)
    frequencies = graph.weights["model_rotary_emb_inv_freq"]
    assert isinstance(frequencies, Constant)
    torch.testing.assert_close(frequencies.value, 10000.0 ** -(torch.arange(0, 16, 2) / 16))
    assert {type(recipe) for recipe in graph.weights.values()} == {Stored, Constant}
    assert graph.info.dtype == torch.bfloat16


def test_nodes_know_the_models_own_lines(captured_family: FamilyCaptures) -> None:
    graph = captured_family("llama").captured.graph
    (node, _) = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
    last = node.meta["stack_trace"].strip().splitlines()[-2:]
    assert "modeling_llama.py" in last[0]
    assert "attention_interface(" in last[1]


def test_tokenizer_files_are_found(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    Tokenizer(BPE()).save(str(tmp_path / "tokenizer.json"))
    files = capture(tmp_path, BuildOptions()).tokenizer_files
    assert [file.name for file in files] == ["tokenizer.json", "generation_config.json"]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    files = capture(tmp_path, BuildOptions()).tokenizer_files
    assert name_of(files[-1]) == "additional_chat_templates/tool_use.jinja" and name_of(files[0]) == "tokenizer.json"


def test_checkpoints_with_other_names_or_shards(tmp_path: Path) -> None:
    """Shards, and a GPT-2 saved from the bare model, without its prefix."""
    sharded = tiny_checkpoint("qwen3", tmp_path / "qwen3")
    split_into_shards(sharded)
    assert_equals_eager(capture(sharded, BuildOptions()), tiny_model("qwen3"))

    bare = tiny_checkpoint("gpt2", tmp_path / "gpt2")
    edit_weights(bare, lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()})
    captured = capture(bare, BuildOptions())
    assert "h_0_attn_c_attn_weight" in captured.graph.weights
    assert_equals_eager(captured, tiny_model("gpt2"))


def test_float16_is_kept_and_float64_needs_a_choice(tmp_path: Path) -> None:
    half, double = tmp_path / "half", tmp_path / "double"
    tiny_checkpoint("llama", half, torch.float16, num_hidden_layers=1)
    assert capture(half, BuildOptions()).graph.info.dtype == torch.float16
    tiny_checkpoint("llama", double, torch.float64, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="float64, which engines do not compute in unasked"):
        capture(double, BuildOptions())
    assert capture(double, BuildOptions(dtype="float32")).graph.info.dtype == torch.float32


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    missing = "model.layers.1.mlp.up_proj.weight"
    edit_weights(tmp_path, lambda tensors: {name: t for name, t in tensors.items() if name != missing})
    with pytest.raises(CheckpointError, match=f"lacks 1 of the model's 21 tensors: {missing}"):
        capture(tmp_path, BuildOptions())


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c.update(intermediate_size=96))
    with pytest.raises(CheckpointError, match=r"has shape \[112, 64\], but config.json gives it the shape \[96, 64\]"):
        capture(tmp_path, BuildOptions())


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({"model_type": "llama9"}, CheckpointError, r"unknown architecture 'llama9' \(transformers "),
        (
            {"model_type": "llama9", "auto_map": {"AutoConfig": "x.Y"}},
            CheckpointError,
            "'llama9' needs Python code from the checkpoint",
        ),
        ({"model_type": None}, CheckpointError, "names no model_type"),
        ({"model_type": "t5", "is_encoder_decoder": True}, CaptureError, "'t5' is an encoder-decoder model"),
        ({"model_type": "vit"}, CaptureError, "'vit' has no causal language model"),
        ({"quantization_config": {"quant_method": "hqq"}}, CheckpointError, "quantized by 'hqq'"),
        ({"hidden_size": "wide"}, CheckpointError, "does not make a llama model: .*'hidden_size'"),
        ({"hidden_act": "sillu"}, CheckpointError, "does not make a llama model: .*sillu"),
    ],
)
def test_configs_that_cannot_be_built(
    change: dict[str, object], error: type[Exception], problem: str, tmp_path: Path
) -> None:
    tiny_checkpoint("llama", tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c.update(change))
    with pytest.raises(error, match=problem):
        capture(tmp_path, BuildOptions())


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model directory"):
        capture(tmp_path / "nowhere", BuildOptions())
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file"):
        capture(file, BuildOptions())
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        capture(tmp_path, BuildOptions())
    for name in ("manifest.json", "program.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match="built engine, not a model"):
        capture(tmp_path, BuildOptions())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read it as JSON"):
        capture(tmp_path, BuildOptions())


def test_chunks_are_passed_on() -> None:
    graph = capture(tiny_model("llama4_text", num_hidden_layers=1), BuildOptions()).graph.graph
    attentions = graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
    assert [call_arguments(n)["chunk"] for n in attentions] == [4]


def test_masks_that_the_attention_cannot_say_are_refused() -> None:
    with pytest.raises(CaptureError, match="passes its own mask"):
        capture(tiny_model("doge"), BuildOptions())
    with pytest.raises(CaptureError, match="bidirectional"):
        capture(tiny_model("bert"), BuildOptions())


def test_a_window_that_only_the_mask_knows_is_kept() -> None:
    graph = capture(tiny_model("phimoe", num_hidden_layers=1), BuildOptions()).graph
    attentions = [n for n in graph.graph.nodes if n.target is torch.ops.llmc.attention.default]
    assert [call_arguments(n)["window"] for n in attentions] == [6]


def test_attention_options_that_change_the_result_are_refused() -> None:
    from llmc.frontends.transformers.hooks import attention_hook

    q = torch.zeros(1, 2, 3, 4)
    module = torch.nn.Module()
    attention_hook(module, q, q, q, None, dropout=0.0, position_ids=torch.arange(3), unused=None)
    with pytest.raises(CaptureError, match="passes alibi to the attention"):
        attention_hook(module, q, q, q, None, alibi=q)
    with pytest.raises(CaptureError, match="is not causal"):
        attention_hook(module, q, q, q, None, is_causal=False)


def test_models_with_their_own_attention_keep_their_masks() -> None:
    model = tiny_model("bloom")
    assert_equals_eager(capture(model, BuildOptions()), model)


def test_experts_are_two_products_with_the_models_own_gate_between() -> None:
    graph = capture(tiny_model("mixtral", num_hidden_layers=1), BuildOptions()).graph
    products = [node for node in graph.graph.nodes if node.target is torch.ops.llmc.expert_linear.default]
    assert [tuple(node.meta["val"].shape[1:]) for node in products] == [(2, 224), (2, 64)]
    verify(graph)
