"""Faults of other engines' routers, planted into tiny models: each changes their logits, and llmc's are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from tests.tolerances import ENGINES

TOKENS = [(7 + 37 * i + i * i) % 150 + 3 for i in range(33)]
# How many times what llmc may be off a fault is.
CLEAR = 20
GROUPED, LOGITS = "deepseek_v3+unnormalized", "gpt_oss"
# Of gpt-oss's router, so that no token has a logit above zero.
BELOW_ZERO = -20.0

Logits = npt.NDArray[np.float32]
Mixture = Callable[[Any, Any, Tensor], Tensor]


def tiny(name: str) -> Any:
    model = tiny_architecture(name)
    if name == LOGITS:
        for layer in model.model.layers:
            layer.mlp.router.bias.data += BELOW_ZERO
    return model


def logits_of(model: Any) -> Logits:
    with torch.inference_mode():
        logits: Logits = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    return logits


def grouped(
    *,
    masked: float = -torch.inf,
    weighs_with_bias: bool = False,
    scales: bool = True,
    scales_shared: bool = False,
) -> Mixture:
    """DeepSeek V3's mixture, written again with the places where others went wrong."""

    def mixture(config: Any, module: Any, hidden: Tensor) -> Tensor:
        x = hidden.flatten(0, 1)
        scores = linear(x, module.gate.weight).sigmoid()
        choice = scores + module.gate.e_score_correction_bias
        of_groups = choice.unflatten(-1, (config.n_group, -1))
        groups = of_groups.topk(2)[0].sum(-1).topk(config.topk_group)[1]
        is_open = torch.zeros(of_groups.shape[:2], dtype=torch.bool).scatter(1, groups, True)
        choice = of_groups.where(is_open[..., None], masked).flatten(1)
        chosen = choice.topk(config.num_experts_per_tok)[1]
        weights = (choice if weighs_with_bias else scores).gather(1, chosen)
        factor = config.routed_scaling_factor
        shared = module.shared_experts(x)
        y: Tensor = module.experts(x, chosen, weights * factor if scales else weights)
        y = y + (shared * factor if scales_shared else shared)
        return y.view_as(hidden)

    return mixture


def from_zero(config: Any, module: Any, hidden: Tensor) -> Tensor:
    """gpt-oss's, with a search for the largest that begins at zero."""
    x = hidden.flatten(0, 1)
    logits = linear(x, module.router.weight, module.router.bias)
    chosen = logits.clamp(min=0).topk(config.num_experts_per_tok)[1]
    y: Tensor = module.experts(x, chosen, logits.gather(1, chosen).softmax(-1))
    return y.view_as(hidden)


FAULTS: dict[str, tuple[str, Mixture]] = {
    "all-negative logits lose to zeros: vllm#37605": (LOGITS, from_zero),
    "masked groups are 0, not -inf: vllm#13474": (GROUPED, grouped(masked=0.0)),
    "the bias that selects weighs, too: vllm#12002": (GROUPED, grouped(weighs_with_bias=True)),
    "no scale without renormalization: sglang-jax#1282": (GROUPED, grouped(scales=False)),
    "the shared expert is scaled, too: sglang#28237": (GROUPED, grouped(scales_shared=True)),
}


def with_mixture(model: Any, mixture: Mixture) -> Logits:
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.forward = partial(_forward, mixture, model.config, layer.mlp)
    return logits_of(model)


def _forward(mixture: Mixture, config: Any, module: Any, hidden: Tensor) -> Any:
    y = mixture(config, module, hidden)
    return (y, None) if config.model_type == LOGITS else y


@pytest.fixture(scope="module", params=["reference", pytest.param("cpu", marks=pytest.mark.slow)])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Logits]:
    """What engines of both models say."""
    logits = {}
    for name in (GROUPED, LOGITS):
        path: Path = tmp_path_factory.mktemp("router") / "engine.llmc"
        llmc.build(tiny(name), path, target=request.param, dtype="float32", max_model_len=64)
        with llmc.load(path) as engine:
            logits[name] = engine.logits(TOKENS)
    return logits.__getitem__


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_others_would_be_seen_and_is_not_ours(fault: str, engines: Callable[[str], Logits]) -> None:
    name, wrong = FAULTS[fault]
    right, model = logits_of(tiny(name)), tiny(name)
    allowed = ENGINES * right.std()
    assert np.abs(with_mixture(model, wrong) - right).max() > CLEAR * allowed
    assert np.abs(engines(name) - right).max() <= allowed


def test_without_a_fault_the_mixture_is_that_of_transformers() -> None:
    model = tiny(GROUPED)
    right = logits_of(model)
    assert np.abs(with_mixture(model, grouped()) - right).max() <= ENGINES * right.std()
