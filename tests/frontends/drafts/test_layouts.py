"""Drafts of every layout compute what an independent reference does, as they are captured and after all passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import sequence_inputs
from llmc.graph.interpreter import GraphInterpreter
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource, evaluate
from llmc.options import BuildOptions
from llmc.passes.pipeline import canonical, default, speculative
from llmc.passes.runner import run_pipeline
from tests import draft_checkpoints as drafts
from tests import latent_expert_layer
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_tokens

Oracle = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Layer = Callable[[Tensor, Mapping[str, Tensor], str], Tensor]


@dataclass(frozen=True)
class Case:
    """A model's directory, what its option `speculative` says, and an oracle for each layer that drafts: from ids and
    hidden states to logits and hidden states."""

    model: Path
    speculative: str
    oracles: tuple[Oracle, ...]


def eagle3(directory: Path, make: Callable[..., Path] = drafts.eagle3, **settings: Any) -> Case:
    model = tiny_checkpoint("llama", directory / "model", tie_word_embeddings=False)
    draft = make(directory / "draft", eagle_aux_hidden_state_layer_ids=[0, 1, 2], **settings)
    tensors = load_file(draft / "model.safetensors")
    table = tensors.get("embed_tokens.weight", load_file(model / "model.safetensors")["model.embed_tokens.weight"])

    def oracle(ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return drafts.eagle3_logits(tensors, ids, hidden, table, settings)

    return Case(model, str(draft), (oracle,))


def mtp(model: Path, layers: Sequence[Mapping[str, str]], head: str, layer: Layer | None = None) -> Case:
    """layers: the names of each one's tensors. head: of the output matrix, in which {} is the layer's prefix."""
    tensors = load_file(model / "model.safetensors")

    def oracle(names: Mapping[str, str], ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output = tensors[head.format(names["layer"])]
        return drafts.mtp_logits(tensors, names, ids, hidden, tensors["model.embed_tokens.weight"], output, layer)

    return Case(model, "mtp", tuple(partial(oracle, names) for names in layers))


def llama(directory: Path) -> Path:
    return tiny_checkpoint("llama", directory / "model", tie_word_embeddings=False)


def qwen_mtp(directory: Path, layers: int = 1) -> Case:
    names = [{**drafts.QWEN, "layer": f"mtp.layers.{number}.", "norm": "mtp.norm"} for number in range(layers)]
    return mtp(drafts.add_qwen_mtp(llama(directory), layers), names, "lm_head.weight")


def deepseek_mtp(directory: Path, layers: int = 1) -> Case:
    model = llama(directory)
    for number in range(2, 2 + layers):
        drafts.add_deepseek_mtp(model, number)
    return mtp(model, [drafts.deepseek_names(number) for number in range(2, 2 + layers)], "{}shared_head.head.weight")


def deepseek_v3_mtp(directory: Path) -> Case:
    """With its own attention and its own experts, as DeepSeek's checkpoints have them."""
    model = latent_expert_layer.deepseek_checkpoint(directory / "model")
    drafts.add_deepseek_mtp(model, layer=latent_expert_layer.layer_tensors)
    return mtp(model, [drafts.deepseek_names(2)], "{}shared_head.head.weight", latent_expert_layer.layer)


CASES: dict[str, Callable[[Path], Case]] = {
    "eagle3": eagle3,
    "eagle3, norm_output": partial(eagle3, norm_output=True),
    "speculators": partial(eagle3, make=drafts.speculators),
    "speculators, norm_before_residual": partial(eagle3, make=drafts.speculators, norm_before_residual=True),
    "speculators, norm_output": partial(eagle3, make=drafts.speculators, norm_output=True, model_type="llama"),
    "qwen mtp": qwen_mtp,
    "qwen mtp of two layers": partial(qwen_mtp, layers=2),
    "deepseek mtp of two layers": partial(deepseek_mtp, layers=2),
    "deepseek mtp of latent attention and experts": deepseek_v3_mtp,
}

# Of tests/runtime/speculation/test_hidden_drafter.py EAGLE 3 is one of the quick ones.
QUICK = ("deepseek mtp of latent attention and experts",)


def captured(case: Case) -> Captured:
    """With the checkpoint of what drafts."""
    return capture(case.model, BuildOptions(speculative=case.speculative))


def attached(model: Captured) -> ModelGraph:
    """The target's graph with its draft."""
    options = BuildOptions()
    return run_pipeline(model.graph, (*canonical(), *speculative()), options).graph


def outputs(
    graph: ModelGraph, source: WeightSource, ids: list[int], chunks: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden states that stand for a target's, and the logits and hidden states of all chunks."""
    weights = {node.name: evaluate(graph.weights[node.name], source) for node in graph.weight_nodes()}
    read, logits, hidden = [], [], []
    for inputs in sequence_inputs(graph, ids, chunk_sizes=chunks, block_size=16):
        results = GraphInterpreter(graph.graph).outputs(weights | inputs)
        read.append(inputs["hidden"].reshape(-1, drafts.WIDTH))
        logits.append(results[0].reshape(-1, results[0].shape[-1]))
        hidden.append(results[1].reshape(-1, drafts.WIDTH))
    return torch.cat(read), torch.cat(logits), torch.cat(hidden)


@pytest.mark.parametrize("name", quick_sample(CASES, QUICK))
def test_logits_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    model = captured(case)
    ids, draft = tiny_tokens(21), attached(model).draft
    for oracle in case.oracles:
        assert draft is not None
        for graph in (draft.graph, run_pipeline(draft.graph, default(), BuildOptions()).graph):
            read, logits, hidden = outputs(graph, model.source, ids, [6, 1, 14])
            expected, expected_hidden = oracle(torch.tensor(ids), read)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(hidden, expected_hidden, rtol=1e-4, atol=1e-4)
            assert expected.std() > 0.5
        draft = draft.graph.draft
    assert draft is None


def test_a_draft_reads_the_token_after_its_hidden_state(tmp_path: Path) -> None:
    """Its rows are not alike with another token, or with another hidden state, and what comes later does not count."""
    case = eagle3(tmp_path)
    ids, hidden = torch.tensor(tiny_tokens(8)), torch.randn(8, drafts.WIDTH, generator=torch.Generator().manual_seed(1))
    first, _ = case.oracles[0](ids, hidden)
    other = ids.clone()
    other[5] += 1
    second, _ = case.oracles[0](other, hidden)
    assert torch.equal(first[:5], second[:5]) and not torch.allclose(first[5], second[5], atol=0.1)
