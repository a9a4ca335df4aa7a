"""What lowering for a GPU gives. This file needs no Triton; the kernels and lowering.py do."""

from dataclasses import dataclass

from llmc.codegen.weight_slots import SlotRecipe
from llmc.graph.refusal import Refusal
from llmc.program import Program


@dataclass(frozen=True)
class DeviceLowered:
    """What the engine is made of. programs: by target's name, with the same weights and limits and their own kernels.

    sources: Python text of each file that kernels are in. recipes: of the weights. refusals: norms that no product took
    in, and why. graph_text: of the graph that was lowered, for machines without the GPU; None if it has no text.
    """

    programs: dict[str, Program]
    sources: dict[str, str]
    recipes: tuple[SlotRecipe, ...]
    refusals: tuple[Refusal, ...] = ()
    graph_text: str | None = None

    @property
    def program(self) -> Program:
        """The first target's."""
        return next(iter(self.programs.values()))
