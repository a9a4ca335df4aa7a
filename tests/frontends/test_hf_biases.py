"""Position biases of transformers' models as what each distance back gets."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch

from llmc.architectures.tiny_config import tiny_config
from llmc.frontends.transformers.biases import METHODS

TOKENS = 9
ROOMS = ("inkling", "inkling2", "inkling2_loop")


def room(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def biases(name: str) -> list[str]:
    return [
        class_name for class_name in dir(room(name)) if class_name.endswith(("RelativeLogits", "RelativePositionBias"))
    ]


FOUND = [
    (name, bias) for name in ROOMS if importlib.util.find_spec(f"transformers.models.{name}") for bias in biases(name)
]


def test_every_such_module_is_known() -> None:
    """Whatever this transformers calls it."""
    assert FOUND and all((class_name, "forward") in METHODS for _, class_name in FOUND)


@pytest.mark.parametrize(("name", "class_name"), FOUND)
def test_biases_by_distance_are_those_of_each_key(name: str, class_name: str) -> None:
    made: Any = getattr(room(name), class_name)
    torch.manual_seed(0)
    positions = torch.arange(TOKENS)
    distance = positions[:, None] - positions[None, :]
    if class_name.endswith("RelativeLogits"):
        module = made(8, 4)
        given: tuple[torch.Tensor, ...] = (torch.randn(1, TOKENS, 2, 8), positions, positions)
    else:
        config = tiny_config(f"{name}_text")
        module = made(config, 2, 4, log_scaling=True)
        given = (torch.randn(1, TOKENS, config.hidden_size), distance, positions[None])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
        expected = module(*given)
        by_distance = METHODS[class_name, "forward"](module, *given)
    near = (distance >= 0) & (distance < 4)
    looked_up = by_distance.gather(-1, distance.clamp(0, 3).expand(1, 2, -1, -1)).where(near, 0.0)
    assert torch.allclose(looked_up, expected, atol=1e-5)
