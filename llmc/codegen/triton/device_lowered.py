"""What lowering for a GPU gives. This file needs no Triton; the kernels and lowering.py do."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.codegen.weight_slots import SlotRecipe
from llmc.program import Program


@dataclass(frozen=True)
class DeviceLowered:
    """What the engine is made of. sources: Python text of each file that kernels are in. recipes: of the weights."""

    program: Program
    sources: dict[str, str]
    recipes: tuple[SlotRecipe, ...]
