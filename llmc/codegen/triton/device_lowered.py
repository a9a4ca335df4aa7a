"""The result of lowering for a GPU. This file does not need Triton; the kernels and lowering.py do."""

from dataclasses import dataclass

from llmc.codegen.weight_slots import SlotRecipe
from llmc.graph.refusal import Refusal
from llmc.program import Program


@dataclass(frozen=True)
class DeviceLowered:
    """The parts of an engine. programs: by target name, with the same weights and limits and their own kernels.

    sources: the Python text of each file of kernels. recipes: how to make each weight. refusals: norms that were not
    fused into a product, and why. graph_text: the lowered graph, for machines without the GPU; None if it has no text.
    folder: the folder of a pipeline stage after the first, with a slash; the names of files begin with it.
    """

    programs: dict[str, Program]
    sources: dict[str, str]
    recipes: tuple[SlotRecipe, ...]
    refusals: tuple[Refusal, ...] = ()
    graph_text: str | None = None
    folder: str = ""

    @property
    def program(self) -> Program:
        """The program of the first target."""
        return next(iter(self.programs.values()))
