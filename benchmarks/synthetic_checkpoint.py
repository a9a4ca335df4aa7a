"""Numbers for a model that has config.json alone: each tensor is made when it is read, and rounded once for all ranks.

A build rounds every weight in a pass and keeps the codes of all in files until it has packed them. Where no disk has
room for those, recipes that read the codes of one layer at a time stand in their place: codes and bytes are the same.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from llmc.codegen.weight_slots import CodesRecipe, SlotRecipe
from llmc.formats.quantized_weight import QuantizedWeight
from llmc.formats.scheme_text import parse_scheme
from llmc.graph.weights import Constant, Derived, PerRank, Recipe, Stored, WeightSource
from llmc.passes.quantization.round_weight import RoundedWeight, round_to_nearest

# Drawn once; a tensor is a run of them, over and over, from a place that its name decides.
_DRAWN = 1 << 24
_PARTS = re.compile(r"(.+)#(codes|scales|zeros)")


class RoundedCheckpoint:
    """A WeightSource of numbers for the shapes of another; NAME#codes, #scales and #zeros are the weight's NAME when
    it is rounded, as the records of a plan say, which is remembered until `forget`."""

    def __init__(self, shapes: WeightSource, records: Iterable[QuantizedWeight]) -> None:
        generator = torch.Generator().manual_seed(0)
        self._drawn = (torch.randn(_DRAWN, generator=generator) * 0.02).to(torch.bfloat16)
        self._shapes = shapes
        self._schemes = {f"{each.module}.weight": parse_scheme(each.scheme) for each in records}
        self._rounded: dict[str, RoundedWeight] = {}

    def names(self) -> tuple[str, ...]:
        """Of the weights as they are before they are rounded."""
        return self._shapes.names()

    def load(self, name: str) -> Tensor:
        """The tensor, or a part of what it is rounded to."""
        asked = _PARTS.fullmatch(name)
        if asked is None:
            like = self._shapes.load(name)
            first = zlib.crc32(name.encode()) % _DRAWN
            times = -(-(first + like.numel()) // _DRAWN)
            return self._drawn.repeat(times)[first : first + like.numel()].view(like.shape).to(like.dtype)
        weight, part = asked.groups()
        if weight not in self._rounded:
            scheme = self._schemes[weight]
            assert scheme is not None, "codes are of a scheme"
            self._rounded[weight] = round_to_nearest(self.load(weight), scheme)
        found: Tensor = getattr(self._rounded[weight], part)
        return found

    def forget(self) -> None:
        """Drop what was rounded."""
        self._rounded.clear()

    def part(self, codes: Constant) -> str:
        """The name of what a planned constant without numbers stands for."""
        (name,), value = codes.made_of, codes.value
        if value.shape == self._shapes.load(name).shape:
            return f"{name}#codes"
        return f"{name}#scales" if value.dtype.is_floating_point else f"{name}#zeros"


def rounded_late(recipe: SlotRecipe, checkpoint: RoundedCheckpoint) -> SlotRecipe:
    """The recipe with parts that are read in the place of constants that have a shape only."""
    if isinstance(recipe, CodesRecipe):
        return CodesRecipe({name: _late(part, checkpoint) for name, part in recipe.parts.items()}, recipe.format)
    late: Recipe = _late(recipe, checkpoint)
    return late


def _late(recipe: Any, checkpoint: RoundedCheckpoint) -> Any:
    if isinstance(recipe, Constant) and recipe.value.is_meta:
        return Stored(checkpoint.part(recipe), recipe.value.dtype)
    if isinstance(recipe, PerRank):
        return PerRank(tuple(_late(each, checkpoint) for each in recipe.recipes))
    if isinstance(recipe, Derived):
        kwargs = tuple((name, _late(value, checkpoint)) for name, value in recipe.kwargs)
        return Derived(recipe.target, tuple(_late(each, checkpoint) for each in recipe.args), kwargs)
    if isinstance(recipe, tuple | list):
        return tuple(_late(each, checkpoint) for each in recipe)
    return recipe


def layer_of(names: tuple[str, ...]) -> int | None:
    """The number of the layer that tensors of these names belong to."""
    found = {int(match[1]) for name in names for match in re.finditer(r"\blayers\.(\d+)\.", name)}
    return found.pop() if len(found) == 1 else None
