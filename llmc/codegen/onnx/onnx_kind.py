"""The target onnxruntime: no code, an engine holds the ONNX model of its graph, and onnxruntime runs it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx
import torch
from torch import Tensor, fx

from llmc.api.build_stages import Stages
from llmc.codegen.logit_rows import check_logit_rows
from llmc.codegen.onnx.graph_model import Place, graph_model, place_weights
from llmc.codegen.onnx.model_files import serialized
from llmc.codegen.onnx.weights import onnx_weights, stored_elements
from llmc.codegen.reference import graph_program
from llmc.codegen.target_kind import refuse_adapters, refuse_stages
from llmc.engine_format.engine_kinds import MODEL_NAME
from llmc.engine_format.reader import find_weights
from llmc.engine_format.writer import EngineWriter
from llmc.errors import LoweringError, OptionError
from llmc.formats.schemes import DEFAULT_TOKENS, TokenDefault
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Recipe
from llmc.options import BuildOptions
from llmc.program import Compression, Layout, Program, WeightSlot, parse_compression
from llmc.targets import OnnxTarget


@dataclass(frozen=True)
class OnnxKind:
    """The TargetKind of engines for onnxruntime."""

    target: OnnxTarget
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    has_stages: bool = False
    tokens: TokenDefault = DEFAULT_TOKENS

    def check(self, options: BuildOptions) -> None:
        """Raise OptionError for another dtype, codes in the cache, several ranks, and drafts in the engine."""
        refuse_stages(options, self.target.name)
        refuse_adapters(options, self.target.name)
        for name in ("dtype", "kv_dtype"):
            requested = getattr(options, name)
            if requested not in ("auto", "float32"):
                raise _refused(f"compute in float32, not {requested}", f"{name}={requested}", name)
        if options.kv_cache != "auto":
            raise _refused(
                f"have no {options.kv_cache} codes in their caches", f"kv_cache={options.kv_cache}", "kv_cache"
            )
        policy = parse_compression(options.kv_compression)
        if isinstance(policy, Compression) and policy.IN_GRAPH:
            raise OptionError(
                f"engines for onnxruntime have no kernels that choose or rotate rows for {policy.shown}",
                at=f"kv_compression={policy.shown}",
                fix="build with kv_compression=stride:step=4,recent=512, or without, or for this machine: target=cpu",
            )
        if options.tensor_parallel_size > 1:
            size = options.tensor_parallel_size
            raise _refused(f"have one rank, not {size}", f"tensor_parallel_size={size}", "tensor_parallel_size")
        if options.speculative is not None:
            raise _refused("have no built-in drafts", f"speculative={options.speculative}", "speculative")

    def check_tools(self, options: BuildOptions) -> None:
        """Builds need none."""

    @contextmanager
    def builder(self, options: BuildOptions) -> "Iterator[OnnxBuilder]":
        """Yield a builder, which has no workers."""
        yield OnnxBuilder(options)

    def pack(self, weight: Tensor, slot: WeightSlot) -> Tensor:
        """The weight in the layout of ONNX."""
        return stored_elements(weight, slot)

    def pack_codes(self, parts: Mapping[str, Tensor], format: str, layout: Layout) -> Tensor:
        """Raise: codes, scales and zeros are separate weights."""
        raise LoweringError(f"{self.target.name} keeps codes as separate weights", at=f"layout {layout.value}")

    def dense_reason(self, storage: fx.Node) -> str:
        """Standard ops would put zeros between the elements in every step."""
        return "onnxruntime has no kernels for weights without their zeros"

    def fitting_sequences(self, program: Program) -> int | None:
        """Return None, because the machine is not known."""
        return None


def _refused(problem: str, at: str, option: str) -> OptionError:
    return OptionError(
        f"engines for onnxruntime {problem}", at=at, fix=f"leave out {option}, or build for this machine: target=cpu"
    )


@dataclass(frozen=True)
class OnnxEngine:
    """An engine for onnxruntime before it is written. program: the program, without launches. recipes: the recipes of
    program.weights, in order. model: the model, without the places of its weights yet."""

    program: Program
    recipes: tuple[Recipe, ...]
    model: onnx.ModelProto


class OnnxBuilder:
    """The Builder of engines for onnxruntime."""

    def __init__(self, options: BuildOptions) -> None:
        self._options = options
        self._engine: OnnxEngine | None = None

    def lower(self, graph: ModelGraph) -> OnnxEngine:
        """The graph's model. Raises LoweringError for ops that standard ONNX ops cannot express."""
        check_logit_rows(graph)
        weights = onnx_weights(graph)
        slots = tuple(weight.slot for weight in weights)
        program = graph_program(graph, self._options, slots)
        # Whatever a model's caches are in: values of the model are fp32.
        program = replace(program, caches=tuple(replace(cache, dtype="F32") for cache in program.caches))
        recipes = tuple(graph.weights[slot.name] for slot in slots)
        self._engine = OnnxEngine(program, recipes, graph_model(graph, weights))
        return self._engine

    def compile(self, writer: EngineWriter, stages: Stages) -> Program:
        """Return the program. Nothing is compiled, and the places of the weights are not known yet."""
        assert self._engine is not None
        return self._engine.program

    def finish(self, writer: EngineWriter, stages: Stages) -> None:
        """Write the model, which refers to the engine's own weights."""
        assert self._engine is not None
        program, model = self._engine.program, self._engine.model
        stored = find_weights(writer.files, program)
        place_weights(
            model,
            {
                slot.name: Place(str(tensor.path.relative_to(writer.path)), tensor.begin, tensor.end - tensor.begin)
                for slot, tensor in zip(program.weights, stored, strict=True)
            },
        )
        with stages("model"):
            writer.write_bytes(MODEL_NAME, serialized(model))
