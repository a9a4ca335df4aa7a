"""What is left of a pruned model computes what the torch model computes without the same channels, heads and layers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmc.errors import OptionError
from llmc.frontends.capture import capture
from llmc.graph.execute import run_tokens
from llmc.options import BuildOptions, parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default
from llmc.passes.pruning.drop_layers import drop_layers
from llmc.passes.runner import run_pipeline
from tests.family_captures import FamilyCapture, FamilyCaptures
from tests.graph_builder import GraphBuilder
from tests.passes.pruning.pruned_models import calibration, pruned, without
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_model, tiny_tokens

# Heads of a plain, a grouped and a joint attention; MLPs that are gated, plain, and of one product for both halves.
MODELS = {
    "llama": "channels=0.25,heads=0.5,layers=1",
    "gpt2": "channels=0.125,heads=0.25,layers=1",
    "qwen3": "channels=0.4,heads=0.5",
    "gemma3_text": "channels=0.1,heads=0.5,layers=1",
    "starcoder2": "channels=0.3,heads=0.5",
    "phi3": "channels=0.25",
}


def hf_logits(model: object, tokens: list[int]) -> Tensor:
    """[tokens, vocabulary]"""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("name", quick_sample(MODELS, ("llama", "gpt2", "gemma3_text", "phi3")))
def test_logits_are_those_of_the_torch_model_without_the_same_parts(
    name: str, captured_family: FamilyCaptures, tmp_path: Path
) -> None:
    family, tokens = captured_family(name), tiny_tokens(23)
    graph = pruned(family, MODELS[name], calibration(tmp_path)).graph
    assert {part.kind for part in graph.pruned} == {
        item.partition("=")[0].replace("layers", "layer") for item in MODELS[name].split(",")
    }
    smaller = without(family.model, graph.pruned)
    expected = hf_logits(smaller, tokens)
    assert not torch.allclose(expected, hf_logits(family.model, tokens), atol=1e-2)
    torch.testing.assert_close(run_tokens(graph, family.captured.source, tokens), expected, atol=1e-4, rtol=0)
    lost = sum(part.parameters - part.parameters_left for part in graph.pruned)
    count = [sum(p.numel() for p in model.parameters()) for model in (family.model, smaller)]
    # A dropped layer's norms and what it lost before are counted with it or with its parts.
    assert lost == pytest.approx(count[0] - count[1], rel=0.02)


def test_what_adds_least_goes(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    """Channels by activation norm times weight norm, as a plain implementation counts them."""
    family, text = captured_family("llama"), calibration(tmp_path)
    seen: list[Tensor] = []
    down = family.model.model.layers[0].mlp.down_proj
    handle = down.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].flatten(0, 1)))
    tokens = torch.tensor(eval_tokens(text)).view(-1, 64)
    with torch.inference_mode():
        family.model.model(tokens, use_cache=False)
    handle.remove()
    importance = seen[0].norm(dim=0) * down.weight.norm(dim=0)
    parts = pruned(family, "channels=0.25", text).graph.pruned
    assert parts[0].module == "model.layers.0.mlp.down_proj" and parts[0].of == 112
    assert sorted(importance.argsort()[:28].tolist()) == list(parts[0].removed)
    kept = [i for i in range(112) if i not in parts[0].removed]
    with torch.inference_mode():
        whole, rest = seen[0] @ down.weight.t(), seen[0][:, kept] @ down.weight[:, kept].t()
    assert parts[0].error == pytest.approx(float((whole - rest).norm() / whole.norm()), rel=0.1)


def eval_tokens(path: str) -> list[int]:
    """Of the calibration file."""

    ids: list[int] = json.loads(Path(path).read_text())
    return ids


def test_the_cache_and_every_later_pass_see_the_smaller_model(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    """Together with zeros and codes, and rules that leave a layer alone."""
    options = {"sparsity": "magnitude:0.5", "quantize": "int8"}
    prune = "channels=0.25,heads=0.5,*.layers.0.*=none"
    result = pruned(captured_family("llama"), prune, calibration(tmp_path), default(), **options)
    assert [(cache.layer, cache.kv_heads) for cache in result.graph.caches] == [(0, 2), (1, 1)]
    assert {part.module.split(".")[2] for part in result.graph.pruned} == {"1"}
    rows = {weight.module: (weight.rows, weight.columns) for weight in result.graph.sparse}
    assert rows["model.layers.1.mlp.down_proj"] == (64, 84) and rows["model.layers.0.mlp.down_proj"] == (64, 112)
    assert rows == {w.module: (w.rows, w.columns) for w in result.graph.quantized if w.module in rows}
    refused = [r for record in result.records if record.name.startswith("prune_") for r in record.refusals]
    assert refused and all(r.is_asked and "*.layers.0.*=none" in r.reason for r in refused)


def test_a_rule_may_name_a_layer_that_goes(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    quantize = "*.layers.0.*=int8,*.layers.1.*=int8"
    graph = pruned(
        captured_family("llama"), "layers=1,*.layers.1.*=none", calibration(tmp_path), quantize=quantize
    ).graph
    assert [part.module for part in graph.pruned] == ["model.layers.0"]
    assert {weight.module.split(".")[2] for weight in graph.quantized} == {"1"}


def test_a_norm_over_all_heads_is_named(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    """OLMo 2 norms the channels of all heads at once; its channels can go, its heads cannot."""
    family, text = captured_family("olmo2"), calibration(tmp_path)
    with pytest.raises(OptionError, match="divides by the mean square of all 64 channels"):
        pruned(family, "heads=0.5", text)
    assert len(pruned(family, "channels=0.5", text).graph.pruned) == 2


@pytest.mark.parametrize(
    ("prune", "problem", "fix"),
    [
        ("channels=1.5", "'1.5' is not a share between 0 and 1", "channels=0.125"),
        ("channels=0", "'0' is not a share", "channels=0.125"),
        ("heads=1", "'1' is not a share between 0 and 1 that leaves something", "heads=0.125"),
        ("heads=half", "'half' is not a share", "heads=0.125"),
        ("layers=0", "'0' is not a number of layers", "layers=2"),
        ("layers=1.5", "'1.5' is not a number of layers", "layers=2"),
        ("0.5", "'0.5' does not name what to remove", "channels=0.125"),
        ("chanels=0.5", "'chanels' is not a part that can be removed", "did you mean channels?"),
        ("heads=0.5,heads=0.25", "heads is given twice", "leave one"),
        ("channels=0.5,*.up_prj=none", "no weight is called '*.up_prj'", "names end in"),
        ("heads=0.4", "0.4 of the 2 KV heads of model.layers.0.self_attn.o_proj is less than one", "a larger share"),
        ("lm_head=0.5", "lm_head=0.5 takes nothing out: no weights of that name", "an MLP or an attention"),
        (
            "*.mlp.*=0.0001",
            "0.0001 of the 112 inner channels of model.layers.0.mlp.down_proj is less",
            "a larger share",
        ),
        ("channels=0.5,*.o_proj=0.4", "*.o_proj=0.4 takes nothing out: 0.4 of the 2 KV heads", "a larger share"),
        ("*.mlp.*=0.5,*.down_proj=none", "*.mlp.*=0.5 takes nothing out: no weights of that name, and of no later", ""),
        ("layers=2", "2 layers cannot be removed: the model has 2, and one must stay", "at most layers=1"),
        ("layers=1,*.layers.*=none", "the model has 2, but only 0 can go: layer 0, model.layers.0, stays", "leave"),
    ],
)
def test_what_cannot_be_is_an_error_with_a_fix(
    prune: str, problem: str, fix: str, captured_family: FamilyCaptures, tmp_path: Path
) -> None:
    with pytest.raises(OptionError) as raised:
        pruned(captured_family("llama"), prune, calibration(tmp_path))
    assert problem in str(raised.value)
    assert raised.value.fix is not None and fix in raised.value.fix


def test_a_rule_may_be_meant_for_one_kind(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    """A quarter of two KV heads is none."""
    parts = pruned(captured_family("llama"), "*.layers.0.*=0.25", calibration(tmp_path)).graph.pruned
    assert [(part.module, len(part.removed)) for part in parts] == [("model.layers.0.mlp.down_proj", 28)]


def test_a_single_kv_head_stays(tmp_path: Path) -> None:
    """Its query heads are no KV heads."""
    model = tiny_model("llama", num_key_value_heads=1)
    model.save_pretrained(tmp_path / "model")
    family = FamilyCapture(model, capture(tmp_path / "model", BuildOptions()))
    with pytest.raises(
        OptionError, match=r"0\.5 of the 1 KV head of model\.layers\.0\.self_attn\.o_proj is less than one"
    ):
        pruned(family, "heads=0.5", calibration(tmp_path))
    assert {part.kind for part in pruned(family, "channels=0.5", calibration(tmp_path)).graph.pruned} == {"channels"}


def test_a_layer_that_hands_on_another_type_stays(tmp_path: Path) -> None:
    """What comes after it could not read what comes before it: here sums are kept in fp32 from the first layer on."""
    aten, b = torch.ops.aten, GraphBuilder(dtype=torch.bfloat16)
    h = b.embedded()
    for number in range(3):
        x = b.call(aten._to_copy.default, b.rms_norm(h, f"layers.{number}.norm"), dtype=torch.bfloat16)
        q, k, v = (
            b.call(aten.reshape.default, b.linear(x, f"layers.{number}.{name}", 8), [-1, 2, 4])
            for name in ("q", "k", "v")
        )
        y = b.call(aten.reshape.default, b.call(torch.ops.llmc.attention.default, q, k, v, 0.5), [-1, 8])
        y = b.call(aten._to_copy.default, b.linear(y, f"layers.{number}.o", 8), dtype=torch.float32)
        h = b.call(aten.add.Tensor, h, y)
    graph, source = b.finish(b.call(aten._to_copy.default, b.rms_norm(h, "norm"), dtype=torch.bfloat16))
    options = {"prune": "layers=1", "calibration": calibration(tmp_path, b.vocab_size), "calibration_length": 64}
    result = run_pipeline(graph, (drop_layers,), parse_options(options), data=ModelData(source))
    assert [part.removed for part in result.graph.pruned] == [(1,)]
    assert [re.sub(r"\bs\d+", "T", refusal.reason) for refusal in result.records[0].refusals] == [
        "the states before and after layer 0 are bfloat16[T, 8] and float32[T, 8]",
        "the states before and after layer 2 are float32[T, 8] and bfloat16[T, 8]",
    ]


def test_text_is_asked_for(captured_family: FamilyCaptures) -> None:
    with pytest.raises(OptionError, match=r"prune=channels=0.5 needs activations, but no calibration text is given"):
        pruned(captured_family("llama"), "channels=0.5", None)


def test_patterns_are_checked_against_what_is_left(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has 101 columns, which runs of 4 do not divide"):
        pruned(captured_family("llama"), "channels=0.1", calibration(tmp_path), sparsity="magnitude:2:4")


def test_channels_of_experts_stay(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="own experts"):
        pruned(captured_family("mixtral"), "channels=0.5", calibration(tmp_path))


def test_without_the_option_nothing_changes(captured_family: FamilyCaptures) -> None:
    family: FamilyCapture = captured_family("llama")
    result = pruned(family, "", None)
    assert not result.graph.pruned
    assert not [r for r in result.records if r.name in ("drop_layers", "prune_heads", "prune_channels") and r.rewrites]
