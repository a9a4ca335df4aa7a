"""The hidden states that a graph gives are those that transformers has before and after the model's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from llmc.errors import PassError
from llmc.frontends.capture import capture
from llmc.graph.execute import sequence_inputs
from llmc.graph.interpreter import GraphInterpreter
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource, evaluate
from llmc.options import BuildOptions
from llmc.passes.pipeline import canonical, default
from llmc.passes.rewrite import Pass
from llmc.passes.runner import run_pipeline
from llmc.passes.speculative.tap_hidden_states import tap_hidden_states
from tests import draft_checkpoints as drafts
from tests.family_captures import FamilyCaptures
from tests.plain_modules import sdpa_decoder
from tests.quick_sample import quick_sample
from tests.tiny_models import FAMILIES, tiny_checkpoint, tiny_tokens

IDS = tiny_tokens(11)


def tapped(graph: ModelGraph, passes: tuple[Pass, ...], options: BuildOptions | None = None) -> ModelGraph:
    return run_pipeline(graph, passes, options or BuildOptions()).graph


def hidden(graph: ModelGraph, source: WeightSource) -> Tensor:
    """The side output of a sequence."""
    weights = {node.name: evaluate(graph.weights[node.name], source) for node in graph.weight_nodes()}
    states = [
        GraphInterpreter(graph.graph).outputs(weights | inputs)[1]
        for inputs in sequence_inputs(graph, IDS, chunk_sizes=[len(IDS)], block_size=16)
    ]
    return torch.cat(states)


@pytest.mark.parametrize("family", quick_sample(FAMILIES, ("llama", "gpt2", "gemma2", "cohere")))
def test_states_are_those_of_transformers(family: str, captured_family: FamilyCaptures) -> None:
    model, captured = captured_family(family).model, captured_family(family).captured
    graph = tapped(captured.graph, (*canonical(), tap_hidden_states((0, 1))))
    with torch.no_grad():
        states = model(torch.tensor([IDS]), output_hidden_states=True, use_cache=False).hidden_states
    expected = torch.cat([states[0][0], states[1][0]], dim=-1)
    torch.testing.assert_close(hidden(graph, captured.source), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", quick_sample(["llama", "gpt2", "olmo2"], ["olmo2"]))
def test_the_last_state_is_before_the_last_norm_and_none_is_after_it(
    family: str, captured_family: FamilyCaptures
) -> None:
    model, captured = captured_family(family).model, captured_family(family).captured
    seen: list[Tensor] = []
    norm = next(m for name, m in model.named_modules() if name in ("model.norm", "transformer.ln_f"))
    handle = norm.register_forward_hook(lambda module, inputs, output: seen.extend((inputs[0], output)))
    with torch.no_grad():
        model(torch.tensor([IDS]), use_cache=False)
    handle.remove()
    for layers, expected in (((2,), seen[0]), (None, seen[1])):
        graph = tapped(captured.graph, (*canonical(), tap_hidden_states(layers)))
        torch.testing.assert_close(hidden(graph, captured.source), expected[0], rtol=1e-4, atol=1e-4)


def test_a_plain_module_has_hidden_states_too() -> None:
    model = sdpa_decoder()
    captured = capture(model, BuildOptions())
    seen: list[Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(torch.tensor([IDS]) % 96)
    graph = tapped(captured.graph, (*canonical(), tap_hidden_states((1,))))
    ids = [i % 96 for i in IDS]
    weights = {node.name: evaluate(graph.weights[node.name], captured.source) for node in graph.weight_nodes()}
    (inputs,) = sequence_inputs(graph, ids, chunk_sizes=[len(ids)], block_size=16)
    actual = GraphInterpreter(graph.graph).outputs(weights | inputs)[1]
    torch.testing.assert_close(actual, seen[0][0], rtol=1e-4, atol=1e-4)


def test_all_passes_keep_the_states(captured_family: FamilyCaptures) -> None:
    """Of every token, though logits are computed for some."""
    captured = captured_family("llama").captured
    first = tapped(captured.graph, (*canonical(), tap_hidden_states((1, 2))))
    passes = (*canonical(), tap_hidden_states((1, 2)), *default()[len(canonical()) :])
    last = tapped(captured.graph, passes)
    torch.testing.assert_close(hidden(last, captured.source), hidden(first, captured.source), rtol=1e-5, atol=1e-5)
    assert last.sides()["hidden"].meta["val"].shape[1] == 128


def test_tapping_twice_changes_nothing(captured_family: FamilyCaptures) -> None:
    captured = captured_family("llama").captured
    tap = tap_hidden_states((1,))
    record = run_pipeline(captured.graph, (*canonical(), tap, tap), BuildOptions()).records[-1]
    assert not record.rewrites


def test_a_layer_that_is_not_there_is_an_error(captured_family: FamilyCaptures) -> None:
    captured = captured_family("llama").captured
    with pytest.raises(PassError, match="no hidden state before layer 7 of 2"):
        tapped(captured.graph, (*canonical(), tap_hidden_states((1, 7))))


@pytest.mark.parametrize(
    "settings", quick_sample([{}, {"norm_before_fc": True}, {"fc_norm": True}], [{"fc_norm": True}])
)
def test_several_states_become_one_as_the_draft_says(settings: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", tie_word_embeddings=False)
    layers = [0, 1, 2]
    draft = drafts.speculators(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=layers, **settings)
    options = BuildOptions(speculative=str(draft))
    captured = capture(model, options)
    taps = hidden(tapped(captured.graph, (*canonical(), tap_hidden_states(layers))), captured.source)
    expected = drafts.combined(load_file(draft / "model.safetensors"), taps, settings)
    actual = hidden(tapped(captured.graph, default(), options), captured.source)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
