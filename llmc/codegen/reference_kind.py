"""The reference target: no code, the graph runs in torch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from llmc.api.build_stages import Stages
from llmc.codegen.plain_rows import plain_rows
from llmc.codegen.reference import ReferenceEngine, lower_reference
from llmc.codegen.target_kind import refuse_adapters, refuse_stages
from llmc.engine_format.engine_kinds import GRAPH_NAME
from llmc.engine_format.writer import EngineWriter
from llmc.errors import LoweringError
from llmc.formats.schemes import DEFAULT_TOKENS, TokenDefault
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.program import Layout, Program, WeightSlot
from llmc.targets import ReferenceTarget


@dataclass(frozen=True)
class ReferenceKind:
    target: ReferenceTarget
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    has_stages: bool = False
    tokens: TokenDefault = DEFAULT_TOKENS

    def check(self, options: BuildOptions) -> None:
        """The eager ops take every dtype and scheme. Raises OptionError for several stages."""
        refuse_stages(options, self.target.name)
        refuse_adapters(options, self.target.name)

    def check_tools(self, options: BuildOptions) -> None:
        """Builds need none."""

    @contextmanager
    def builder(self, options: BuildOptions) -> "Iterator[ReferenceBuilder]":
        """Yield a builder, which has no workers."""
        yield ReferenceBuilder(options)

    def pack(self, weight: Tensor, slot: WeightSlot) -> Tensor:
        """The weight in the layout of the checkpoint."""
        return plain_rows(weight, slot)

    def pack_codes(self, parts: Mapping[str, Tensor], format: str, layout: Layout) -> Tensor:
        """Raise: codes, scales and zeros are separate weights."""
        raise LoweringError(f"{self.target.name} keeps codes as separate weights", at=f"layout {layout.value}")

    def dense_reason(self, storage: fx.Node) -> None:
        """The eager ops read masks."""

    def fitting_sequences(self, program: Program) -> int | None:
        """Return None, because the machine is not known."""
        return None


class ReferenceBuilder:
    def __init__(self, options: BuildOptions) -> None:
        self._options = options
        self._engine: ReferenceEngine | None = None

    def lower(self, graph: ModelGraph) -> ReferenceEngine:
        """Keep the graph. Raises LoweringError."""
        self._engine = lower_reference(graph, self._options)
        return self._engine

    def compile(self, writer: EngineWriter, stages: Stages) -> Program:
        """Write the graph's text."""
        assert self._engine is not None
        with stages("compile"):
            writer.write_text(GRAPH_NAME, self._engine.graph_text)
        return self._engine.program

    def finish(self, writer: EngineWriter, stages: Stages) -> None:
        """Do nothing: the engine is complete."""
