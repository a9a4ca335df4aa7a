"""The GPU targets: Triton kernels, compiled ahead of time by processes that start while the model is captured."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from llmc.api.build_stages import Stages
from llmc.codegen.plain_rows import plain_rows
from llmc.codegen.quantized_support import check_kernels
from llmc.codegen.target_kind import check_adapters, refuse_draft_layers
from llmc.codegen.triton.code_rows import blocked_rows, code_rows
from llmc.codegen.triton.compile import Workers, compile_program, require_triton
from llmc.codegen.triton.device_lowered import DeviceLowered
from llmc.codegen.triton.mask_rows import mask_rows
from llmc.codegen.triton.memory_fit import check_memory, fitting_sequences
from llmc.engine_format.engine_kinds import GRAPH_NAME
from llmc.engine_format.reader import PROGRAMS
from llmc.engine_format.writer import EngineWriter
from llmc.formats.schemes import DEFAULT_TOKENS, TokenDefault
from llmc.graph.model_graph import ModelGraph
from llmc.graph.source_line import source_line
from llmc.options import BuildOptions
from llmc.processes.processors import usable_processors
from llmc.program import Layout, Program, WeightSlot
from llmc.program.program_json import program_to_json
from llmc.targets import GpuTarget

# The file with the nodes that lowering for a GPU did not fuse, and why.
LOWERING_NAME = "report/lowering.json"


@dataclass(frozen=True)
class TritonKind:
    target: GpuTarget
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    has_stages: bool = True
    tokens: TokenDefault = DEFAULT_TOKENS

    def check(self, options: BuildOptions) -> None:
        """Raise ToolchainError without Triton, OptionError for a scheme or KV cache that the kernels lack."""
        refuse_draft_layers(options)
        check_adapters(options)
        require_triton()
        from llmc.codegen.triton.backend import TritonBackend  # imports Triton, which may be missing

        check_kernels(options, TritonBackend(self.target), self.target.name)

    def check_tools(self, options: BuildOptions) -> None:
        """`check` needs Triton itself."""

    @contextmanager
    def builder(self, options: BuildOptions) -> "Iterator[TritonBuilder]":
        """Start processes that import torch and Triton while the model is captured."""
        with Workers(usable_processors()) as workers:
            workers.start()
            yield TritonBuilder(self.target, options, workers)

    def pack(self, weight: Tensor, slot: WeightSlot) -> Tensor:
        """Pack a weight as rows of elements, codes or masks."""
        if slot.layout.code_bits is not None:
            return code_rows(weight, slot.layout)
        if slot.layout in (Layout.MASK_ROWS, Layout.MASK_STARTS):
            return mask_rows(weight, slot.layout)
        return plain_rows(weight, slot)

    def pack_codes(self, parts: Mapping[str, Tensor], format: str, layout: Layout) -> Tensor:
        """Codes or steps of a blocked format, as rows; its floats are separate weights."""
        return blocked_rows(parts, format, layout)

    def dense_reason(self, storage: fx.Node) -> str | None:
        """Return why a sparse weight stays dense: one token's product is predicted to be no faster on any GPU of the
        engine. None if it does not."""
        from llmc.codegen.triton.kernels.products.sparse_ways import dense_reason  # imports Triton

        reasons = (dense_reason(storage, member) for member in self.target.compiled)
        return next((reason for reason in reasons if reason is not None), None)

    def fitting_sequences(self, program: Program) -> int | None:
        """Return the number of sequences of full length that fit the memory of the data sheet."""
        return fitting_sequences(program, self.target)


class TritonBuilder:
    def __init__(self, target: GpuTarget, options: BuildOptions, workers: Workers) -> None:
        self._target, self._options, self._workers = target, options, workers
        self._lowered: DeviceLowered | None = None

    def lower(self, graph: ModelGraph) -> DeviceLowered:
        """Lower a graph to launches of kernels. Raises LoweringError, and OptionError for an engine that does not fit
        the GPU's memory."""
        from llmc.codegen.triton.lowering import lower_device  # imports Triton, which may be missing

        self._lowered = lower_device(graph, self._target, self._options)
        check_memory(self._lowered.program, self._target, self._options)
        return self._lowered

    def compile(self, writer: EngineWriter, stages: Stages) -> Program:
        """Write the kernels' sources, the graph and what was refused, and compile every binary of every member."""
        lowered = self._lowered
        assert lowered is not None
        count = sum(len(program.launched_kernels()) for program in lowered.programs.values())
        with stages("compile", count):
            for name, text in lowered.sources.items():
                writer.root.write_text(name, text)
            if lowered.graph_text is not None:
                writer.write_text(GRAPH_NAME, lowered.graph_text)
            refused = [
                {"node": r.node.name, "reason": r.reason, "source": source_line(r.node)} for r in lowered.refusals
            ]
            writer.write_json(LOWERING_NAME, refused)
            for member in self._target.compiled:
                self._compile_member(member, lowered, writer, stages)
        return lowered.program

    def finish(self, writer: EngineWriter, stages: Stages) -> None:
        """Do nothing: the engine is complete."""

    def _compile_member(self, member: GpuTarget, lowered: DeviceLowered, writer: EngineWriter, stages: Stages) -> None:
        # One target's binaries may have the names of another's.
        folder = lowered.folder + (f"kernels/{member.name}" if self._target.members else "kernels")
        root = writer.root
        program = lowered.programs[member.name]
        compiled = compile_program(program, root.path, member, stages.advance, folder, self._workers)
        for kernel in compiled.launched_kernels():
            for name in kernel.binaries[member.arch_name].files:
                root.add_file(name)
        lowered.programs[member.name] = compiled
        if compiled is not lowered.program:
            writer.write_text(f"{PROGRAMS}/{member.name}.json", program_to_json(compiled))
