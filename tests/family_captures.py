"""The tiny families captured from fp32 checkpoints, once each: passes leave what they are given as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.options import BuildOptions
from tests.tiny_models import tiny_model


@dataclass(frozen=True)
class FamilyCapture:
    """model: the transformers model. captured: from the directory that it was saved to."""

    model: Any
    captured: Captured


FamilyCaptures = Callable[[str], FamilyCapture]


def family_captures(directories: pytest.TempPathFactory) -> FamilyCaptures:
    """A function from a family's name to its capture; neither the graph nor the model may be changed."""

    @cache
    def captured_family(family: str) -> FamilyCapture:
        model = tiny_model(family)
        directory = directories.mktemp(family)
        model.save_pretrained(directory)
        return FamilyCapture(model, capture(directory, BuildOptions()))

    return captured_family
