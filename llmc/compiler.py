"""The compiler: capture → passes → lowering → kernels → weights → engine directory. Read this file first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from llmc.api.build_stages import Progress, Stages
from llmc.api.keywords import shows_keywords
from llmc.codegen.expand_sparse import expand_sparse
from llmc.codegen.limits import longest_sequence
from llmc.codegen.shared_weights import shared_slots, with_shared_tables
from llmc.codegen.stage_builds import StageBuild, stage_builds
from llmc.codegen.target_kind import TargetKind, kind_of
from llmc.codegen.weight_slots import CodesRecipe, SlotRecipe
from llmc.debug.check_passes import PassChecker
from llmc.debug.dump import dumped
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.engine_format.path_argument import path_argument
from llmc.engine_format.reader import DRAFT, DRAFT_IDS_NAME, REPORT_NAME, SHARED_NAME
from llmc.engine_format.writer import EngineWriter
from llmc.errors import BuildWarning, LoweringError, OptionError, PassError
from llmc.files.scratch_directory import ScratchDirectory
from llmc.files.storage_error import full_disk_told
from llmc.files.tokenizer_files import name_of
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured, Model
from llmc.frontends.drafts.draft_engine import draft_options, target_ids
from llmc.frontends.front_end import OpenedModel
from llmc.frontends.given_tokenizer import given_tokenizer, with_tokenizer
from llmc.frontends.open_model import open_model
from llmc.graph.dtype_names import torch_name
from llmc.graph.finite_weights import FiniteWeights
from llmc.graph.model_graph import AttachedDraft
from llmc.graph.stage import Stage
from llmc.graph.weights import Recipe, WeightSource, evaluate, stored_names
from llmc.options import BuildKeywords, BuildOptions, build_defaults, parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.named_inputs import check_build_inputs
from llmc.passes.pipeline import built_in, default, essential
from llmc.passes.rewrite import Pass
from llmc.passes.runner import Observer, PipelineResult, run_pipeline
from llmc.program import WeightSlot, fitted_compression, unused_compression
from llmc.program.joined_program import joined_program
from llmc.report.build_record import BuildObserver, BuildRecord
from llmc.report.build_report import BuildReport, build_report, manifest_of
from llmc.report.coverage.coverage import check_complete
from llmc.report.page.page import report_page
from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.settings import settings
from llmc.simulation.choose_division import DivisionWish, consider_divisions
from llmc.targets import Target, resolve_target


@shows_keywords(BuildKeywords, build_defaults())
def compile(
    model: Model,
    *,
    target: str = "cpu",
    output: str | Path | None = None,
    passes: Sequence[Pass] | None = None,
    tokenizer: object | None = None,
    executor: ExecutorName | None = None,
    parallel: Literal["auto"] | None = None,
    ranks: int | None = None,
    memory: float | None = None,
    trace: str | Path | None = None,
    **options: Unpack[BuildKeywords],
) -> Engine:
    """Compile a causal language model and open the engine.

    The target need not run on this machine. Such an engine can be inspected (`report`, `explain`, `predict`) and saved,
    and calls that need the target raise TargetError.

    Args:
        model: A Hugging Face directory, a .gguf or .onnx file, a name on the hub (org/name, org/name@revision), a
            transformers model, a torch.nn.Module from token ids [1, T] to logits [1, T, V], or an ExportedProgram of
            one.
        target: A name from `llmc targets`.
        output: Path of the engine directory. By default it is temporary and is deleted with the engine; Engine.save
            keeps it.
        passes: The pipeline, by default `llmc.passes.default()`.
        tokenizer: The tokenizer of a model object, or a replacement for a directory's own: a fast tokenizer of
            transformers, a tokenizers.Tokenizer, or a directory.
        executor: As in `llmc.load`.
        parallel: "auto" divides the model among `ranks` as the simulator finds best (docs/simulation.md).
        ranks: With `parallel`, the number of ranks.
        memory: With `parallel`, the memory of a rank in GB, by default the target's.
        trace: With `parallel`, a file with the load, by default 200 requests at once.
        **options: The fields of llmc.options.BuildOptions.

    Returns:
        The engine, loaded.

    Raises:
        LlmcError: The subclasses in llmc.errors: OptionError and TargetError for arguments, CheckpointError and
            CaptureError for the model, PassError, LoweringError and ToolchainError for the build.
    """
    owned = None if output is not None else ScratchDirectory()
    path = output if owned is None else owned.path / "engine.llmc"
    assert path is not None
    wish: Any = {"parallel": parallel, "ranks": ranks, "memory": memory, "trace": trace}
    built = build(model, path, target=target, passes=passes, tokenizer=tokenizer, **wish, **options)
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
    parallel: Literal["auto"] | None = None,
    ranks: int | None = None,
    memory: float | None = None,
    trace: str | Path | None = None,
    **options: Unpack[BuildKeywords],
) -> BuildReport:
    """Compile a model into an engine directory, without loading it.

    Args:
        model: As in `compile`.
        output: Path of the engine directory, which is created atomically.
        target: As in `compile`, and so are the arguments that are not listed here.
        progress: Receives the stages of the build.

    Returns:
        The figures of the build: sizes in bytes, times in seconds, and the outcome for each pass and weight.

    Raises:
        LlmcError: As in `compile`.
    """
    place, resolved, parsed = path_argument("output", output), resolve_target(target), parse_options(options)
    wish = DivisionWish(parallel, ranks, memory, None if trace is None else path_argument("trace", trace))
    wish.check(options)
    pipeline, kind = default() if passes is None else _checked(passes), kind_of(resolved)
    kind.check(parsed)  # Before a model is fetched.
    kind.check_tools(parsed)
    check_build_inputs(pipeline, parsed)
    opened = open_model(model)
    if parallel is not None:
        parsed = parsed.model_copy(update=consider_divisions(opened, resolved, wish, options, pipeline).sizes())
        kind.check(parsed)
    parsed, notes = in_dtype_of_target(opened, resolved, kind, parsed)
    with full_disk_told(place.parent, settings().cache_dir), given_tokenizer(tokenizer) as tokenizer_files:

        def captured() -> Captured:
            fresh = with_tokenizer(capture(opened, parsed), tokenizer_files)
            longest_sequence(fresh.graph.info, parsed)  # Refused now, not when passes have read all weights.
            return fresh

        report = _write_engine(captured, place, resolved, kind, parsed, pipeline, Stages(progress), notes)
    for note in report.warnings:
        warnings.warn(note, BuildWarning, stacklevel=3)
    return report


def _write_engine(
    captured_now: Callable[[], Captured],
    output: Path,
    target: Target,
    kind: TargetKind,
    options: BuildOptions,
    pipeline: tuple[Pass, ...],
    stages: Stages,
    notes: tuple[str, ...],
    outer: Sequence[StageBuild] = (),
) -> BuildReport:
    """Build an engine, including that of its drafter. captured_now: called when capture ends, while kernels begin to
    compile. outer: weights of the enclosing engine, which are not stored again."""
    finite = FiniteWeights()
    with EngineWriter(output) as writer, kind.builder(options) as builder:
        with stages("capture"):
            captured = captured_now()
        with stages("passes", len(pipeline)):
            result, record = run_passes(captured, pipeline, options, stages, kind)
        result = replace(result, graph=expand_sparse(result.graph, kind.dense_reason))
        record.write(result.graph, writer)
        with stage_builds(result.graph, kind, options, builder, writer, stages) as builds:
            programs = [part.program for part in builds]
            program = joined_program(programs)
            shared = shared_slots(outer, builds) if outer else {}
            if shared:
                writer.write_json(SHARED_NAME, shared)
            own = [slot for slot in program.weights if slot.name not in shared]
            with stages("weights", program.ranks * sum(slot.nbytes for slot in own)):
                for stage_build in builds:
                    _write_weights(stage_build, shared, captured.source, finite, kind, writer, stages)
            with stages("report"):
                for file in captured.tokenizer_files:
                    writer.copy_file(f"tokenizer/{name_of(file)}", file)
                manifest = manifest_of(captured.graph.info, target, options, program, result.records)
                contents = record.contents(result.graph, writer, manifest, programs)
                writer.write_text(REPORT_NAME, report_page(contents))
            for stage_build in builds:
                stage_build.builder.finish(stage_build.writer, stages)
        notes += captured.notes + finite.notes()
        unused = unused_compression(fitted_compression(options.kv_compression, options.block_size), program.limits)
        notes += () if unused is None else (unused,)
        if result.graph.draft is not None:
            with stages("draft"):
                notes += _write_draft(result.graph.draft, captured, builds, writer, target, options, pipeline)
        with stages("finish"):
            manifest = writer.finish(manifest)
    fitting = [kind.fitting_sequences(stage) for stage in programs]
    least = None if fitting[0] is None else min(count for count in fitting if count is not None)
    return build_report(output, target, result, program, manifest, stages.seconds, notes, least)


def _write_weights(
    build: StageBuild,
    shared: Collection[str],
    source: WeightSource,
    finite: FiniteWeights,
    kind: TargetKind,
    writer: EngineWriter,
    stages: Stages,
) -> None:
    """The weights of all ranks of a stage, except shared ones."""
    program = build.program
    for rank in range(program.ranks):
        makers = [
            (slot, partial(packed, slot, recipe, source, finite, kind, rank))
            for slot, recipe in zip(program.weights, build.recipes, strict=True)
            if slot.name not in shared
        ]
        writer.write_weights(makers, rank=program.layout.rank_of(program.stage, rank), progress=stages.advance)


def _write_draft(
    draft: AttachedDraft,
    captured: Captured,
    outer: Sequence[StageBuild],
    writer: EngineWriter,
    target: Target,
    options: BuildOptions,
    pipeline: tuple[Pass, ...],
) -> tuple[str, ...]:
    """Build the drafter's engine in the folder DRAFT of its target's engine, and return notes for the build."""
    own, notes = draft_options(options, outer[0].program.limits)
    place = Captured(with_shared_tables(draft.graph, captured.graph, captured.source), captured.source)
    report = _write_engine(
        lambda: place, writer.path / DRAFT, target, kind_of(target), own, pipeline, Stages(None), notes, outer
    )
    writer.add_engine(DRAFT)
    if draft.id_offsets is not None:
        offsets = evaluate(draft.id_offsets, captured.source)
        writer.write_bytes(DRAFT_IDS_NAME, target_ids(offsets, captured.graph.info))
    return report.warnings


def _checked(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    if not isinstance(passes, Sequence):
        raise OptionError(
            f"passes cannot be {passes!r:.80} ({type(passes).__name__})",
            at="passes",
            fix="give a list: passes=[*llmc.passes.default(), my_pass]",
        )
    return tuple(passes)


def in_dtype_of_target(
    model: OpenedModel[Any], target: Target, kind: TargetKind, options: BuildOptions
) -> tuple[BuildOptions, tuple[str, ...]]:
    """The options with another dtype in the place of a model's own where the target does not compute in that, and what
    a build should say of it."""
    stored, instead = model.dtype, torch_name(kind.dtypes[-1])
    if options.dtype != "auto" or stored is None or stored in kind.dtypes:
        return options, ()
    cost = "takes more memory" if instead == "float32" else "rounds its weights; dtype=float32 keeps every bit"
    note = (
        f"the model is {torch_name(stored)}, which engines for {target.name} do not compute in: it is built as "
        f"{instead}, which {cost}"
    )
    return options.model_copy(update={"dtype": instead}), (note,)


def run_passes(
    captured: Captured, passes: Sequence[Pass], options: BuildOptions, stages: Stages, kind: TargetKind
) -> tuple[PipelineResult, BuildRecord]:
    """Run the pipeline, and record what its passes do for the report.

    Raises OptionError if the pipeline was cut before stage serving.
    """
    seen = BuildObserver(captured.graph, {p.name for p in built_in()}, options)
    watchers: list[Observer] = [lambda record, graph: stages.advance(1), seen]
    if options.check_passes:
        watchers.append(PassChecker(captured.graph, captured.source))
    observe = dumped(captured.graph, *watchers)
    data = ModelData(captured.source, captured.tokenizer, stages.count, kind.tokens)
    result = run_pipeline(captured.graph, passes, options, observe, data, essential=essential())
    if result.graph.stage not in (Stage.SERVING, Stage.OPTIMIZED):
        raise OptionError(
            f"the pipeline ended at stage {result.graph.stage.value}; an engine needs a graph of stage serving",
            at=f"stop_after={options.stop_after}" if result.was_cut else "passes",
            fix="cut later, or see the graph with: llmc passes MODEL --stop-after N --graph"
            if result.was_cut
            else "keep every default pass up to page_kv_cache: passes=[*llmc.passes.default(), my_pass]",
        )
    record = seen.record(result.records)
    if options.strict:
        check_complete(record.coverage)
    return result, record


def packed(
    slot: WeightSlot, recipe: SlotRecipe, source: WeightSource, finite: FiniteWeights, kind: TargetKind, rank: int = 0
) -> Tensor:
    """Return one weight of a rank in kernel layout. The checkpoint's tensors are read by this call and dropped after
    it."""

    def value(part: Recipe) -> Tensor:
        return finite.look(stored_names(part), evaluate(part, finite.reading(source), rank))

    if isinstance(recipe, CodesRecipe):
        parts = {name: value(part) for name, part in recipe.parts.items()}
        packed_codes = kind.pack_codes(parts, recipe.format, slot.layout)
        return filled(packed_codes, slot)
    tensor = value(recipe)
    if tuple(tensor.shape) != slot.shape:
        raise PassError(
            f"weight {slot.name} is {list(tensor.shape)}, but the graph has {list(slot.shape)}",
            at=", ".join(stored_names(recipe)),
            fix="the pass that made its recipe has to give its placeholder that shape",
        )
    check_ids(tensor, slot, stored_names(recipe))
    return filled(kind.pack(tensor, slot), slot)


def check_ids(weight: Tensor, slot: WeightSlot, names: Sequence[str]) -> None:
    """Raise LoweringError for whole numbers that 32 bits, which engines keep of them, do not hold. names: the names of
    the checkpoint's tensors."""
    if slot.dtype != "I32" or weight.dtype is not torch.int64 or not weight.numel():
        return
    held = torch.iinfo(torch.int32)
    least, most = (int(extreme) for extreme in weight.aminmax())
    if least < held.min or most > held.max:
        raise LoweringError(
            f"{slot.name} holds numbers from {least} to {most}, and engines keep ids in 32 bits",
            at=", ".join(names) or "a buffer that the model computes",
            fix=f"make the table's numbers at most {held.max}: the values of ids that a model looks up",
        )


def filled(packed: Tensor, slot: WeightSlot) -> Tensor:
    """Append zeros if a rank has fewer elements than the slot has room for."""
    if not slot.layout.is_sparse:
        return packed
    return torch.nn.functional.pad(packed, (0, slot.nbytes // packed.dtype.itemsize - len(packed)))
