"""Texts of the copying model's training hold what they say is known, and the shipped model is of the script's shape."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.recall import COPYING
from benchmarks.train_copying_model import VOCABULARY, copied, text, train, untrained


@pytest.mark.parametrize("length", [32, 100, 512, 1024])
def test_known_tokens_follow_from_those_before(length: int) -> None:
    chance = random.Random(0)
    for _ in range(20):
        tokens, known = text(length, chance)
        assert len(tokens) == len(known) == length and any(known) and max(tokens) < VOCABULARY
        for place in (place for place, is_known in enumerate(known) if is_known):
            followers = {tokens[at + 1] for at in range(place - 1) if tokens[at] == tokens[place - 1]}
            assert tokens[place] in followers


def test_training_is_reproducible_and_changes_every_weight() -> None:
    models = list[LlamaForCausalLM]()
    for _ in range(2):
        torch.manual_seed(0)
        models.append(untrained())
        assert train(models[-1], [32, 128], random.Random(0)) == 2 * 2048
    torch.manual_seed(0)
    for (name, one), other, before in zip(
        models[0].named_parameters(), models[1].parameters(), untrained().parameters(), strict=True
    ):
        assert torch.equal(one, other) and not torch.equal(one, before), name


def test_the_shipped_model_is_what_the_script_trains() -> None:
    shipped = LlamaForCausalLM.from_pretrained(COPYING)
    shapes = {name: value.shape for name, value in untrained().state_dict().items()}
    assert {name: value.shape for name, value in shipped.state_dict().items()} == shapes
    assert copied(shipped, 512, 4, random.Random(2)) >= 0.98
