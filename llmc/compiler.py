"""The compiler: capture → passes → lowering → kernels → weights → engine directory. Read this file first."""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, Unpack

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from llmc.build_report import BuildReport, build_report, manifest_of
from llmc.codegen.cpp.backend import CppBackend
from llmc.codegen.cpp.background import BackgroundCompiler
from llmc.codegen.cpp.build import SOURCE_NAME, library_name
from llmc.codegen.cpp.pack import pack
from llmc.codegen.cpp.pack_codes import pack_codes
from llmc.codegen.lowering import Lowered, lower
from llmc.codegen.quantized_support import check_kernels
from llmc.codegen.reference import ReferenceEngine, lower_reference
from llmc.codegen.triton.code_rows import code_rows
from llmc.codegen.triton.compile import Workers, compile_program, processors, require_triton
from llmc.codegen.triton.device_lowered import DeviceLowered
from llmc.codegen.triton.memory_fit import check_memory
from llmc.codegen.weight_slots import CodesRecipe, SlotRecipe
from llmc.debug.check_passes import PassChecker
from llmc.debug.coverage import check_complete
from llmc.debug.coverage_observer import CoverageObserver
from llmc.debug.dump import dumped
from llmc.debug.explain import Explanation
from llmc.debug.explain_text import overview_lines
from llmc.debug.graph_record import GraphRecord
from llmc.debug.report.contents import read_contents
from llmc.debug.report.page import report_page
from llmc.engine_format import EngineWriter
from llmc.engine_format.path_argument import path_argument
from llmc.engine_format.reader import (
    COVERAGE_NAME,
    EXPLANATION_NAME,
    GRAPH_NAME,
    NODES_NAME,
    PASSES_NAME,
    PROGRAM_NAME,
    PROGRAMS,
    QUANTIZATION_NAME,
    REPORT_NAME,
)
from llmc.errors import BuildWarning, OptionError, PassError
from llmc.graph.capture import Captured, capture
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.graph.finite_weights import FiniteWeights
from llmc.graph.given_tokenizer import given_tokenizer, with_tokenizer
from llmc.graph.model_graph import ModelGraph
from llmc.graph.source_line import source_line
from llmc.graph.stage import Stage
from llmc.graph.stored_dtype import stored_dtype
from llmc.graph.weights import Recipe, WeightSource, evaluate, stored_names
from llmc.keywords import shows_keywords
from llmc.options import BuildKeywords, BuildOptions, build_defaults, parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import built_in, default, essential
from llmc.passes.rewrite import Pass
from llmc.passes.runner import Observer, PipelineResult, run_pipeline
from llmc.program import Layout, WeightSlot
from llmc.program_json import program_to_json
from llmc.runtime.engine import Engine, load
from llmc.runtime.executors.opening import ExecutorName
from llmc.storage_error import storage_error
from llmc.targets import CpuTarget, GpuTarget, Target, resolve_target
from llmc.typed_json import to_json

# What lowering for a GPU left alone, and why.
LOWERING_NAME = "report/lowering.json"

LoweredEngine = Lowered | DeviceLowered | ReferenceEngine
Model = str | Path | nn.Module | ExportedProgram


class Progress(Protocol):
    """Who is told how a build goes on."""

    def stage(self, name: str, total: int | None) -> None:
        """A stage begins (and the one before has ended); `total` units of work, None if unknown."""
        ...

    def advance(self, amount: int) -> None:
        """That much of the stage's total is done."""
        ...


@shows_keywords(BuildKeywords, build_defaults())
def compile(
    model: Model,
    *,
    target: str = "cpu",
    output: str | Path | None = None,
    passes: Sequence[Pass] | None = None,
    tokenizer: object | None = None,
    executor: ExecutorName | None = None,
    **options: Unpack[BuildKeywords],
) -> Engine:
    """Compile a causal language model and open the engine.

    For any target on any machine: where the engine cannot run, it can be looked at (`report`, `explain`, `predict`) and
    saved, and what needs the target raises TargetError.

    model: a Hugging Face directory, a transformers model, a torch.nn.Module from token ids [1, T] to logits
    [1, T, V], or an ExportedProgram of one. target: a name from `llmc targets`. output: where the engine directory
    goes; without it, a temporary one that lives as long as the engine (Engine.save keeps it). passes: replaces
    llmc.passes.default(). tokenizer: for a model object, or in the place of a directory's own: a fast tokenizer of
    transformers, a tokenizers.Tokenizer, or a directory. executor: as in llmc.load. options: the fields of
    llmc.options.BuildOptions. Raises LlmcError.
    """
    owned = None if output is not None else tempfile.TemporaryDirectory(prefix="llmc-")
    path = output if owned is None else Path(owned.name) / "engine.llmc"
    assert path is not None
    built = build(model, path, target=target, passes=passes, tokenizer=tokenizer, **options)
    return load(built.path, executor=executor, owned=owned)


@shows_keywords(BuildKeywords, build_defaults())
def build(
    model: Model,
    output: str | Path,
    *,
    target: str = "cpu",
    passes: Sequence[Pass] | None = None,
    tokenizer: object | None = None,
    progress: Progress | None = None,
    **options: Unpack[BuildKeywords],
) -> BuildReport:
    """Compile a model into an engine directory at `output`, whole or not at all. Arguments as in `compile`."""
    place = path_argument("output", output)
    return _build(model, place, resolve_target(target), parse_options(options), passes, tokenizer, Stages(progress))


@dataclass
class Stages:
    """Passes stages on to a Progress and times them."""

    progress: Progress | None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str, total: int | None = None) -> Iterator[None]:
        if self.progress is not None:
            self.progress.stage(name, total)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def advance(self, amount: int) -> None:
        if self.progress is not None:
            self.progress.advance(amount)

    def count(self, name: str, done: int, total: int) -> None:
        """`done` of `total` steps of a part of a stage are done; the stage goes on when all are."""
        if self.progress is None:
            return
        if done == 0:
            self.progress.stage(name, total)
        elif done < total:
            self.progress.advance(1)
        else:
            self.progress.stage("passes", None)


def _build(
    model: Model,
    output: Path,
    target: Target,
    options: BuildOptions,
    passes: Sequence[Pass] | None,
    tokenizer: object | None,
    stages: Stages,
) -> BuildReport:
    pipeline = default() if passes is None else _checked(passes)
    check_dtypes(target, options)
    if isinstance(target, GpuTarget):
        require_triton()
    check_quantization(target, options)
    options, notes = without_half(model, target, options)
    finite = FiniteWeights()
    with (
        given_tokenizer(tokenizer) as tokenizer_files,
        EngineWriter(output) as writer,
        BackgroundCompiler(target, options) as compiler,
        kernel_workers(target) as workers,
    ):
        with stages("capture"):
            captured = with_tokenizer(capture(model, options), tokenizer_files)
        with stages("passes", len(pipeline)):
            result = run_passes(captured, pipeline, options, writer, stages)
        with stages("lower"):
            engine = lower_for(target, result.graph, options)
            check_memory(engine.program, target, options)
        if isinstance(engine, Lowered):
            writer.write_text(SOURCE_NAME, engine.source)
            compiler.start(engine, writer.path / SOURCE_NAME)
        else:
            with stages("compile", binary_count(engine, target)):
                engine = compile_for(target, engine, writer, stages, workers)
        writer.write_text(PROGRAM_NAME, program_to_json(engine.program))
        weights = engine.program.weights
        with stages("weights", sum(slot.nbytes for slot in weights)):
            source = captured.source
            makers = [
                partial(packed, slot, recipe, source, finite)
                for slot, recipe in zip(weights, engine.recipes, strict=True)
            ]
            writer.write_weights(list(zip(weights, makers, strict=True)), progress=stages.advance)
        with stages("report"):
            for file in captured.tokenizer_files:
                writer.copy_file(f"tokenizer/{file.name}", file)
            manifest = manifest_of(captured.graph.info, target, options, engine.program, result.records)
            writer.write_text(REPORT_NAME, report_page(read_contents(writer.files, manifest, engine.program)))
        if isinstance(engine, Lowered):
            with stages("compile"):
                try:
                    library = compiler.finish()
                except OSError as error:
                    raise storage_error(error, writer.path) from None
                writer.write_bytes(library_name(library), library)
        with stages("finish"):
            manifest = writer.finish(manifest)
    notes += captured.notes + finite.notes()
    for note in notes:
        warnings.warn(note, BuildWarning, stacklevel=4)
    return build_report(output, target, result, engine.program, manifest, stages.seconds, notes)


def _checked(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    if not isinstance(passes, Sequence):
        raise OptionError(
            f"passes cannot be {passes!r:.80} ({type(passes).__name__})",
            at="passes",
            fix="give a list: passes=[*llmc.passes.default(), my_pass]",
        )
    return tuple(passes)


def check_dtypes(target: Target, options: BuildOptions) -> None:
    """Raise OptionError for a dtype that the target has no kernels for, before anything is read."""
    for name in ("dtype", "kv_dtype"):
        if isinstance(target, CpuTarget) and getattr(options, name) == "float16":
            raise OptionError(
                f"{target.name} has no kernels for float16",
                at=f"{name}=float16",
                fix="choose bfloat16, which takes as much memory, or float32; or build for a GPU",
            )


def without_half(model: Model, target: Target, options: BuildOptions) -> tuple[BuildOptions, tuple[str, ...]]:
    """The options with bfloat16 in the place of a model's own float16 where the target does not compute in that, and
    what a build should say of it."""
    if options.dtype != "auto" or isinstance(target, GpuTarget) or stored_dtype(model) is not torch.float16:
        return options, ()
    note = (
        f"the model is float16, which engines for {target.name} do not compute in: it is built as bfloat16, which "
        "rounds its weights; dtype=float32 keeps every bit"
    )
    return options.model_copy(update={"dtype": "bfloat16"}), (note,)


def check_quantization(target: Target, options: BuildOptions) -> None:
    """Raise OptionError for a scheme or KV cache that the target has no kernels for, before anything is read."""
    if isinstance(target, CpuTarget):
        check_kernels(options, CppBackend(target), target.name)
    elif isinstance(target, GpuTarget):
        from llmc.codegen.triton.backend import TritonBackend  # imports Triton, which CPU builds do without

        check_kernels(options, TritonBackend(target), target.name)


def run_passes(
    captured: Captured, passes: Sequence[Pass], options: BuildOptions, writer: EngineWriter, stages: Stages
) -> PipelineResult:
    """The pipeline, with the graph after each pass in report/; an engine needs a graph of at least stage serving."""
    kept, covered = GraphRecord(captured.graph), CoverageObserver({p.name for p in built_in()}, options)
    watchers: list[Observer] = [lambda record, graph: stages.advance(1), kept, covered]
    if options.check_passes:
        watchers.append(PassChecker(captured.graph, captured.source))
    observe = dumped(captured.graph, *watchers)
    data = ModelData(captured.source, captured.tokenizer, stages.count)
    result = run_pipeline(captured.graph, passes, options, observe, data, essential=essential())
    if result.graph.stage not in (Stage.SERVING, Stage.OPTIMIZED):
        raise OptionError(
            f"the pipeline ended at stage {result.graph.stage.value}; an engine needs a graph of stage serving",
            at=f"stop_after={options.stop_after}" if result.was_cut else "passes",
            fix="cut later, or look at the graph with: llmc passes MODEL --stop-after N --graph"
            if result.was_cut
            else "keep every default pass up to page_kv_cache: passes=[*llmc.passes.default(), my_pass]",
        )
    for name, text in (*kept.files.items(), (NODES_NAME, kept.nodes_text())):
        writer.write_text(name, text)
    records = [record.to_json() for record in result.records]
    writer.write_text(PASSES_NAME, json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    coverage = covered.coverage()
    writer.write_text(COVERAGE_NAME, json.dumps(to_json(coverage), indent=1, ensure_ascii=False) + "\n")
    explanation = overview_lines(captured.graph.info.name, Explanation(result.records, coverage))
    writer.write_text(EXPLANATION_NAME, "".join(f"{line.text}\n" for line in explanation))
    if options.strict:
        check_complete(coverage)
    if result.graph.quantized:
        weights = [asdict(weight) for weight in result.graph.quantized]
        writer.write_text(QUANTIZATION_NAME, json.dumps(weights, indent=1, ensure_ascii=False) + "\n")
    return result


def lower_for(target: Target, graph: ModelGraph, options: BuildOptions) -> LoweredEngine:
    """Choose kernels and plan memory, or keep the graph for the reference target."""
    if isinstance(target, CpuTarget):
        return lower(graph, target, options)
    if isinstance(target, GpuTarget):
        from llmc.codegen.triton.lowering import lower_device  # imports Triton, which CPU builds do without

        return lower_device(graph, target, options)
    return lower_reference(graph, options)


def kernel_workers(target: Target) -> AbstractContextManager[Workers | None]:
    """Processes that compile GPU kernels, started now: they import torch and Triton while the model is captured."""
    return Workers(processors()) if isinstance(target, GpuTarget) else nullcontext()


def compile_for(
    target: Target,
    engine: DeviceLowered | ReferenceEngine,
    writer: EngineWriter,
    stages: Stages,
    workers: Workers | None,
) -> LoweredEngine:
    """Write what the executor runs: GPU binaries with their sources, or the graph's text.

    workers: for GPU binaries; without any they are started for each target. Returns the engine with what compiling has
    found out about GPU kernels.
    """
    if isinstance(engine, ReferenceEngine):
        writer.write_text(GRAPH_NAME, engine.graph_text)
        return engine
    assert isinstance(target, GpuTarget)
    for name, text in engine.sources.items():
        writer.write_text(name, text)
    if engine.graph_text is not None:
        writer.write_text(GRAPH_NAME, engine.graph_text)
    left_alone = [{"node": r.node.name, "reason": r.reason, "source": source_line(r.node)} for r in engine.refusals]
    writer.write_text(LOWERING_NAME, json.dumps(left_alone, indent=1, ensure_ascii=False) + "\n")
    for member in target.compiled:
        # One target's binaries may have the names of another's.
        folder = f"kernels/{member.name}" if target.members else "kernels"
        program = engine.programs[member.name]
        compiled = compile_program(program, writer.path, member, stages.advance, folder, workers)
        for kernel in compiled.launched_kernels():
            writer.add_file(kernel.binaries[member.arch_name].file)
        engine.programs[member.name] = compiled
        if compiled is not engine.program:
            writer.write_text(f"{PROGRAMS}/{member.name}.json", program_to_json(compiled))
    return engine


def binary_count(engine: LoweredEngine, target: Target) -> int | None:
    """How many GPU binaries are compiled; None for a CPU."""
    if not isinstance(target, GpuTarget):
        return None
    assert isinstance(engine, DeviceLowered)
    return sum(len(program.launched_kernels()) for program in engine.programs.values())


def packed(slot: WeightSlot, recipe: SlotRecipe, source: WeightSource, finite: FiniteWeights) -> Tensor:
    """One weight in kernel layout; the checkpoint's tensors are read now and dropped after."""

    def value(part: Recipe) -> Tensor:
        return finite.look(stored_names(part), evaluate(part, source))

    if isinstance(recipe, CodesRecipe):
        zeros = None if recipe.zeros is None else value(recipe.zeros)
        return pack_codes(value(recipe.codes), value(recipe.scales), zeros, recipe.format, slot.layout)
    tensor = value(recipe)
    if tuple(tensor.shape) != slot.shape:
        raise PassError(
            f"weight {slot.name} is {list(tensor.shape)}, where the graph has {list(slot.shape)}",
            at=", ".join(stored_names(recipe)),
            fix="the pass that made its recipe has to give its placeholder that shape",
        )
    if slot.layout in (Layout.CODE_ROWS, Layout.CODE_PAIR_ROWS):
        return code_rows(tensor, slot.layout)
    return pack(tensor, slot.layout, TORCH_DTYPES[slot.dtype])
