"""The CPU targets: C++ that is compiled while weights are packed and the report is made."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from llmc.api.build_stages import Stages
from llmc.codegen.cpp.backend import CppBackend
from llmc.codegen.cpp.background import BackgroundCompiler
from llmc.codegen.cpp.build import SOURCE_NAME, library_name
from llmc.codegen.cpp.kernel_library import parts_of
from llmc.codegen.cpp.lowering import Lowered, lower
from llmc.codegen.cpp.pack import pack
from llmc.codegen.cpp.pack_codes import pack_codes
from llmc.codegen.cpp.pack_sparse import DENSE, pack_sparse, pack_sparse_codes
from llmc.codegen.cpp.products import NO_SPARSE_EXPERTS
from llmc.codegen.cpp.toolchain_check import check_toolchain
from llmc.codegen.quantized_support import check_kernels
from llmc.codegen.target_kind import check_adapters, refuse_draft_layers
from llmc.engine_format.writer import EngineWriter
from llmc.errors import OptionError
from llmc.formats.schemes import TokenDefault
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_of_experts
from llmc.options import BuildOptions
from llmc.program import Layout, Program, WeightSlot
from llmc.targets import CpuTarget

_TOKENS = TokenDefault(rounds_plain=True)


@dataclass(frozen=True)
class CppKind:
    target: CpuTarget
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    has_stages: bool = True
    tokens: TokenDefault = _TOKENS

    def check(self, options: BuildOptions) -> None:
        """Raise OptionError for a dtype, a scheme or a KV cache that the kernels lack, and for options that exclude
        each other, such as draft layers with pipeline stages."""
        for name in ("dtype", "kv_dtype"):
            if getattr(options, name) == "float16":
                raise OptionError(
                    f"{self.target.name} has no kernels for float16",
                    at=f"{name}=float16",
                    fix="choose bfloat16, which takes as much memory, or float32; or build for a GPU",
                )
        refuse_draft_layers(options)
        check_adapters(options)
        check_kernels(options, CppBackend(self.target), self.target.name, self.tokens)

    def check_tools(self, options: BuildOptions) -> None:
        """Raise ToolchainError without a C++ compiler for the target."""
        check_toolchain(self.target, parts_of(options))

    @contextmanager
    def builder(self, options: BuildOptions) -> "Iterator[CppBuilder]":
        """Begin to compile the kernels that every engine is linked with."""
        with BackgroundCompiler(self.target, options) as compiler:
            yield CppBuilder(self.target, options, compiler)

    def pack(self, weight: Tensor, slot: WeightSlot) -> Tensor:
        """The weight in the slot's layout: panels or rows."""
        into = pack_sparse if slot.layout in DENSE else pack
        return into(weight, slot.layout, TORCH_DTYPES[slot.dtype])

    def pack_codes(self, parts: Mapping[str, Tensor], format: str, layout: Layout) -> Tensor:
        """Pack codes in panels together with scales and zeros."""
        if layout in DENSE:
            return pack_sparse_codes(parts["codes"], parts["scales"], layout)
        return pack_codes(parts, format, layout)

    def dense_reason(self, storage: fx.Node) -> str | None:
        """Return why a sparse weight stays dense: no instruction moves its elements to their places, or it belongs to
        experts. None if it does not."""
        if not self.target.has("avx512_vbmi2"):
            return f"{self.target.name} has no VBMI2 instructions, which put elements into their places"
        if any(map(is_of_experts, storage.users)):
            return NO_SPARSE_EXPERTS
        return None

    def fitting_sequences(self, program: Program) -> int | None:
        """Return None, because the machine is not known."""
        return None


class CppBuilder:
    def __init__(self, target: CpuTarget, options: BuildOptions, compiler: BackgroundCompiler) -> None:
        self._target, self._options, self._compiler = target, options, compiler
        self._lowered: Lowered | None = None

    def lower(self, graph: ModelGraph) -> Lowered:
        """Lower a graph to launches of kernels. Raises LoweringError."""
        self._lowered = lower(graph, self._target, self._options)
        return self._lowered

    def compile(self, writer: EngineWriter, stages: Stages) -> Program:
        """Write the source and begin to compile it."""
        assert self._lowered is not None
        writer.write_text(SOURCE_NAME, self._lowered.source)
        self._compiler.start(self._lowered, writer.path / SOURCE_NAME)
        return self._lowered.program

    def finish(self, writer: EngineWriter, stages: Stages) -> None:
        """Wait for the library. Raises what compiling raises."""
        with stages("compile"):
            library = self._compiler.finish()
            writer.write_bytes(library_name(library), library)
