"""The interface of a kind of target for builds, from the options to the engine's files; one object per kind.

`kind_of` finds it; a new kind is a new package with such an object, and a line there.
"""

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from llmc.api.build_stages import Stages
from llmc.codegen.weight_slots import SlotRecipe
from llmc.engine_format.writer import EngineWriter
from llmc.errors import OptionError
from llmc.formats.schemes import TokenDefault
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.program import Layout, Program, WeightSlot
from llmc.targets import CpuTarget, GpuTarget, OnnxTarget, ReferenceTarget, Target


class LoweredEngine(Protocol):
    """The result of lowering. recipes: how to make each of program.weights, before packing."""

    @property
    def program(self) -> Program:
        """The program of the target, or of the first of several."""

    @property
    def recipes(self) -> Sequence[SlotRecipe]:
        """The recipes of weights, in the order of program.weights."""


class Builder(Protocol):
    """One build for one target, with the workers that it has under way."""

    def lower(self, graph: ModelGraph) -> LoweredEngine:
        """Choose kernels and plan memory. Raises LoweringError, and OptionError for options that do not fit the
        target."""

    def compile(self, writer: EngineWriter, stages: Stages) -> Program:
        """Write what is known of the engine's code, and begin or do its compiling; the program to be written."""

    def finish(self, writer: EngineWriter, stages: Stages) -> None:
        """Write what is compiled only now that weights and report are there."""


class TargetKind(Protocol):
    """One kind of target."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of engines. The last one replaces missing ones, unless a dtype is requested by name."""

    @property
    def has_stages(self) -> bool:
        """Whether engines run each pipeline stage as a separate program."""

    def check(self, options: BuildOptions) -> None:
        """Raise LlmcError for options that the target does not support, before anything is read."""

    def check_tools(self, options: BuildOptions) -> None:
        """Raise ToolchainError where a tool is missing that builds need."""

    def builder(self, options: BuildOptions) -> AbstractContextManager[Builder]:
        """Start the workers of a build. Leaving it by an error does not wait for them."""

    def pack(self, weight: Tensor, slot: WeightSlot) -> Tensor:
        """A weight's elements in the slot's layout: 1-D, contiguous."""

    def pack_codes(self, parts: Mapping[str, Tensor], format: str, layout: Layout) -> Tensor:
        """Codes with their scales and zeros in one slot, where the kind stores them so."""

    @property
    def tokens(self) -> TokenDefault:
        """The rounding of tokens if neither a scheme nor a checkpoint defines one."""

    def dense_reason(self, storage: fx.Node) -> str | None:
        """Return why a sparse weight is stored with its zeros; None if it is read faster without them."""

    def fitting_sequences(self, program: Program) -> int | None:
        """Number of sequences of full length that the target holds in addition to the engine; None if its memory is
        unknown."""


KINDS: Mapping[type[Any], tuple[str, str]] = MappingProxyType(
    {
        CpuTarget: ("llmc.codegen.cpp.cpp_kind", "CppKind"),
        GpuTarget: ("llmc.codegen.triton.triton_kind", "TritonKind"),
        ReferenceTarget: ("llmc.codegen.reference_kind", "ReferenceKind"),
        OnnxTarget: ("llmc.codegen.onnx.onnx_kind", "OnnxKind"),
    }
)


def kind_of(target: Target) -> TargetKind:
    """The kind's object for a target. Its room is imported only now: that of GPUs needs Triton."""
    module, name = KINDS[type(target)]
    kind: TargetKind = getattr(importlib.import_module(module), name)(target)
    return kind


def check_adapters(options: BuildOptions) -> None:
    """Check options of a kind whose engines accept adapters. Raises OptionError for options that exclude them."""
    if not options.enable_lora:
        return
    if options.tensor_parallel_size * options.pipeline_parallel_size > 1:
        raise OptionError(
            "engines of several ranks do not support adapters at run time yet",
            at=f"enable_lora, tensor_parallel_size={options.tensor_parallel_size}",
            fix="build for one rank, or merge one adapter into the weights: lora=NAME=DIRECTORY",
        )
    if any(method in text for text in options.quantize for method in ("awq", "smoothquant")):
        raise OptionError(
            "AWQ and SmoothQuant scale the channels that adapters read",
            at=f"enable_lora, quantize={','.join(options.quantize)}",
            fix="quantize by gptq or to the nearest",
        )
    if options.prune:
        raise OptionError(
            "pruning takes out channels that adapters read", at=f"enable_lora, prune={','.join(options.prune)}"
        )


def refuse_adapters(options: BuildOptions, target: str) -> None:
    """Check options of a kind whose engines do not support adapters. Raises OptionError for enable_lora."""
    if options.enable_lora:
        raise OptionError(
            f"engines for {target} do not support adapters at run time yet",
            at="enable_lora",
            fix="build for a CPU, or merge one adapter into the weights: lora=NAME=DIRECTORY",
        )


def refuse_draft_layers(options: BuildOptions) -> None:
    """Check options of a kind whose engines run stages as separate programs. Raises OptionError for draft layers in an
    engine of several stages."""
    if options.pipeline_parallel_size > 1 and options.speculative is not None:
        raise OptionError(
            "draft layers read the model's hidden states, which engines with pipeline stages do not collect",
            at=f"speculative={options.speculative}, pipeline_parallel_size={options.pipeline_parallel_size}",
            fix="use only tensor_parallel_size, or draft with another engine, ngram, suffix or lookahead",
        )


def refuse_stages(options: BuildOptions, target: str) -> None:
    """Check options of a kind whose engines have one stage. Raises OptionError for more."""
    stages = options.pipeline_parallel_size
    if stages > 1:
        raise OptionError(
            f"engines for {target} do not support pipeline stages",
            at=f"pipeline_parallel_size={stages}",
            fix=f"build for a CPU or a GPU, or with tensor_parallel_size={stages * options.tensor_parallel_size}",
        )
