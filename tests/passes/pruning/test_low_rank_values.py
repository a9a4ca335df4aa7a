"""Values of low rank: the graph computes what a torch model computes whose values are projected the same way."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.architectures.tiny_config import tiny_architecture
from llmc.errors import OptionError
from llmc.formats.pruned_part import PrunedPart
from llmc.formats.pruning import parse_pruning
from llmc.frontends.capture import capture
from llmc.graph.execute import run_tokens
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.pruning.value_ranks import value_ranks
from tests.family_captures import FamilyCapture, FamilyCaptures
from tests.passes.pruning.pruned_models import calibration, pruned
from tests.passes.pruning.test_pruning import hf_logits
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_tokens

# Grouped heads, heads with norms of queries and keys, biases, one product of Q, K and V with biases, and windows.
MODELS = ("llama", "qwen3", "qwen2", "gpt2", "phi3", "gemma3_text")
QUICK = ("llama", "qwen2", "gpt2")
TOKENS = tiny_tokens(23)


def value_rows(family: FamilyCapture, text: str) -> list[Tensor]:
    """The values of each layer on the calibration text, [tokens, kv_heads, channels], as a hook sees them."""
    seen: list[Tensor] = []
    made = [module for name, module in family.model.named_modules() if name.endswith("v_proj")]
    width = family.model.model.layers[0].self_attn.head_dim
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: seen.append(output.flatten(0, 1)))
        for module in made
    ]
    tokens = torch.tensor(json.loads(Path(text).read_text())).view(-1, 64)
    with torch.inference_mode():
        family.model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [rows.unflatten(1, (-1, width)) for rows in seen]


def projected(family: FamilyCapture, rows: list[Tensor], rank: int) -> tuple[Any, list[float]]:
    """A copy whose values have that rank, by a singular value decomposition; and the energy that each layer keeps."""
    made, kept = copy.deepcopy(family.model), list[float]()
    for layer, values in zip(made.model.layers, rows, strict=True):
        _, sizes, directions = torch.linalg.svd(values.double().transpose(0, 1), full_matrices=False)
        first = directions[:, :rank].float()
        onto = torch.block_diag(*(first.transpose(1, 2) @ first))
        projection = layer.self_attn.v_proj
        projection.weight.data = onto @ projection.weight.data
        if projection.bias is not None:
            projection.bias.data = onto @ projection.bias.data
        kept.append(float(sizes[:, :rank].square().sum() / sizes.square().sum()))
    return made, kept


@pytest.mark.parametrize("name", quick_sample(MODELS, QUICK))
def test_full_rank_changes_nothing(name: str, captured_family: FamilyCaptures, tmp_path: Path) -> None:
    family = captured_family(name)
    graph = pruned(family, f"value_rank={_channels(family)}", calibration(tmp_path)).graph
    assert graph.pruned and all(part.kind == "values" and not part.removed for part in graph.pruned)
    expected = hf_logits(family.model, TOKENS)
    torch.testing.assert_close(run_tokens(graph, family.captured.source, TOKENS), expected, atol=1e-4, rtol=0)


def _channels(family: FamilyCapture) -> int:
    config = family.model.config
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


@pytest.mark.parametrize("name", quick_sample(("llama", "qwen2", "qwen3"), ("llama", "qwen2")))
def test_logits_are_those_of_projected_values(name: str, captured_family: FamilyCaptures, tmp_path: Path) -> None:
    family, text = captured_family(name), calibration(tmp_path)
    graph = pruned(family, "value_rank=6", text).graph
    model, kept = projected(family, value_rows(family, text), 6)
    expected = hf_logits(model, TOKENS)
    assert not torch.allclose(expected, hf_logits(family.model, TOKENS), atol=1e-3)
    torch.testing.assert_close(run_tokens(graph, family.captured.source, TOKENS), expected, atol=1e-4, rtol=0)
    for part, energy in zip(graph.pruned, kept, strict=True):
        assert part.removed == tuple(range(6, part.of)) and 1 - part.error**2 == pytest.approx(energy, abs=1e-5)
        assert part.parameters_left / part.parameters == pytest.approx(6 / part.of)


def test_caches_hold_the_ranks_and_later_passes_see_them(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    """Together with heads and channels that go, codes of weights, and a rule that leaves a layer alone."""
    prune = "value_rank=8,heads=0.5,channels=0.25,*.layers.0.*=none"
    family = captured_family("llama")
    result = pruned(family, prune, calibration(tmp_path), default(), quantize="int8")
    width = _channels(family)
    caches = [(cache.kv_heads, cache.head_dim, cache.value_dim) for cache in result.graph.caches]
    assert caches == [(2, width, width), (1, width, 8)]
    assert [part.module for part in result.graph.pruned if part.kind == "values"] == ["model.layers.1.self_attn.v_proj"]
    refused = [r for record in result.records if record.name == "low_rank_values" for r in record.refusals]
    assert [r.is_asked for r in refused] == [True] and "*.layers.0.*=none" in refused[0].reason


def test_a_budget_goes_where_least_energy_is_lost() -> None:
    steep, flat = (torch.tensor([values] * 2).double() for values in ([8.0, 4, 1, 0], [1.0, 1, 1, 1]))
    assert value_ranks(parse_pruning(["values=0.25"]), [steep, flat]) == [2, 4]
    assert value_ranks(parse_pruning(["values=0.5"]), [steep, flat]) == [2, 2]
    assert value_ranks(parse_pruning(["values=0.9"]), [steep, flat]) == [1, 1]
    assert value_ranks(parse_pruning(["value_rank=3"]), [steep, flat]) == [3, 3]
    wide = torch.arange(128, 0, -1).double()[None]
    assert value_ranks(parse_pruning(["values=0.5"]), [wide]) == [64]
    assert value_ranks(parse_pruning(["values=0.47"]), [wide]) == [72], "steps of a sixteenth of a head"


def test_a_budget_is_shared_by_the_layers(captured_family: FamilyCaptures, tmp_path: Path) -> None:
    family = captured_family("llama")
    parts: tuple[PrunedPart, ...] = pruned(family, "values=0.5", calibration(tmp_path)).graph.pruned
    gone, channels = sum(len(part.removed) for part in parts), sum(part.of for part in parts)
    assert len(parts) == 2 and 2 * gone == channels


def test_values_that_latents_make_are_refused(tmp_path: Path) -> None:
    model, folder = tiny_architecture("deepseek_v2"), tmp_path / "model"
    model.save_pretrained(folder)
    family = FamilyCapture(model, capture(folder, BuildOptions()))
    with pytest.raises(OptionError, match="no value channel can be taken out: the values"):
        pruned(family, "value_rank=8", calibration(tmp_path, model.config.vocab_size))


@pytest.mark.parametrize(
    ("prune", "problem"),
    [
        ("values=1.5", "'1.5' is not a share between 0 and 1"),
        ("value_rank=0", "'0' is not a number of channels"),
        ("value_rank=half", "'half' is not a number of channels"),
        ("values=0.5,value_rank=8", "values=0.5 and value_rank=8 both say how many value channels stay"),
        ("valeus=0.5", "'valeus' is not a part that can be removed"),
        ("value_rank=500", "channels a head, not 500"),
    ],
)
def test_what_cannot_be_is_refused(prune: str, problem: str, captured_family: FamilyCaptures, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        pruned(captured_family("llama"), prune, calibration(tmp_path))
    assert problem in caught.value.problem and caught.value.fix


def test_text_is_needed(captured_family: FamilyCaptures) -> None:
    with pytest.raises(OptionError, match=r"prune=values=0\.5 needs activations"):
        pruned(captured_family("llama"), "values=0.5", None)
