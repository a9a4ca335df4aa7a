"""Export: capture → passes up to a stage → an ONNX model with its weights, tokenizer and config."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Unpack, get_args

from llmc.api.build_stages import Progress, Stages
from llmc.api.keywords import shows_keywords
from llmc.codegen.onnx.installed import require_onnx
from llmc.engine_format.engine_kinds import MODEL_NAME
from llmc.engine_format.manifest import is_engine, read_manifest
from llmc.engine_format.path_argument import path_argument
from llmc.engine_format.reader import read_engine
from llmc.errors import OptionError
from llmc.files.atomic_directory import AtomicDirectory
from llmc.files.tokenizer_files import name_of
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured, Model
from llmc.frontends.given_tokenizer import given_tokenizer, with_tokenizer
from llmc.frontends.open_model import open_model
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.options import BuildKeywords, BuildOptions, build_defaults, parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default
from llmc.passes.rewrite import Pass
from llmc.passes.runner import run_pipeline

STAGES = (Stage.CAPTURED, Stage.CANONICAL, Stage.SERVING, Stage.OPTIMIZED)
# Standard ops only, or the form that onnxruntime-genai runs.
Flavour = Literal["standard", "genai"]
FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)
_CONFIG = "config.json"


@dataclass(frozen=True)
class ExportReport:
    """The outcome of an export.

    Attributes:
        path: The directory.
        stage: The stage of the graph.
        nodes: Number of calls in the graph.
        functions: Number of different ops that they call.
        model_bytes: Size of model.onnx.
        weight_bytes: Size of the weights.
        seconds: Times by part of the export.
    """

    path: Path
    stage: str
    nodes: int
    functions: int
    model_bytes: int
    weight_bytes: int
    seconds: dict[str, float]


@shows_keywords(BuildKeywords, build_defaults())
def export(
    model: Model,
    output: str | Path,
    *,
    stage: str | None = None,
    flavour: Flavour = "standard",
    against: str | Path | None = None,
    passes: Sequence[Pass] | None = None,
    tokenizer: object | None = None,
    progress: Progress | None = None,
    **options: Unpack[BuildKeywords],
) -> ExportReport:
    """Write a model's graph at a stage as an ONNX model, into a directory that is created atomically.

    Numbers are fp32, and weights of fewer bits are widened; codes stay codes.

    Args:
        model: As in `compile`, or an engine directory.
        output: Path of the directory. An earlier export at this path is replaced.
        stage: "captured", "canonical", "serving" or "optimized"; default "optimized".
        flavour: "standard" uses only standard ops. "genai" writes a canonical graph for onnxruntime-genai, with its
            config.
        against: For an engine, the model that it was built from; the stages follow the engine's options. Without it, an
            engine for onnxruntime is exported as it is.
        passes: As in `compile`, and so are `tokenizer` and the options.
        progress: Receives the stages of the export.

    Returns:
        The path, the stage, the number of nodes and ops, sizes in bytes and times in seconds.

    Raises:
        LlmcError: As in `compile`, and OptionError if the package onnx is missing.
    """
    require_onnx("export")
    # Here, where it is known that the packages of the extra are there.
    from llmc.codegen.onnx.model_files import write_model_files

    place, wanted = path_argument("output", output), _stage(stage, flavour)
    parsed = in_single_precision(parse_options(options))
    stages = Stages(progress)
    # Before the model is opened: an engine for onnxruntime has a model.onnx, as a directory of an ONNX model does.
    engine = _engine_of(model)
    if engine is not None:
        if against is None:
            return _export_engine(engine, place, stage, flavour, parsed, stages)
        parsed = _options_of(engine, parsed)
        model = against
    elif against is not None:
        raise OptionError("this option applies to engines only", at=f"against={against}", fix="leave it out")

    opened = open_model(model)
    with (
        AtomicDirectory(place, _is_export, content="an exported model") as directory,
        given_tokenizer(tokenizer) as tokenizer_files,
    ):
        with stages("capture"):
            captured = with_tokenizer(capture(opened, parsed), tokenizer_files)
        with stages("passes"):
            graph = graph_at(captured, wanted, parsed, default() if passes is None else tuple(passes), stages)
        with stages("weights", sum(_bytes(graph))):
            written = write_model_files(
                graph, captured.source, directory.path, stages.advance, for_genai=flavour == "genai"
            )
        with stages("finish"):
            for file in (*captured.tokenizer_files, *_config_of(opened.directory)):
                copy = directory.path / name_of(file)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
            directory.commit()
    return ExportReport(place, wanted.value, **asdict(written), seconds=stages.seconds)


def graph_at(
    captured: Captured, stage: Stage, options: BuildOptions, passes: Sequence[Pass], stages: Stages
) -> ModelGraph:
    """The graph when a stage's last pass has run. Raises OptionError for a stage that these passes do not reach."""
    if stage is Stage.CAPTURED:
        return captured.graph
    later = STAGES[STAGES.index(stage) + 1 :]
    end = next((i for i, pass_ in enumerate(passes) if pass_.stage in later), len(passes))
    data = ModelData(captured.source, captured.tokenizer, stages.count)
    graph = run_pipeline(captured.graph, passes[:end], options, data=data).graph
    if graph.stage is not stage:
        raise OptionError(
            f"the passes end at stage {graph.stage.value}", at=f"stage={stage.value}", fix="use the default passes"
        )
    return graph


def in_single_precision(options: BuildOptions) -> BuildOptions:
    """The options with fp32 for whatever the model has. Raises OptionError if another dtype is requested."""
    for name in ("dtype", "kv_dtype"):
        requested = getattr(options, name)
        if requested not in ("auto", "float32"):
            raise OptionError(
                f"ONNX models compute in float32, not {requested}", at=f"{name}={requested}", fix=f"leave out {name}"
            )
    return options.model_copy(update={"dtype": "float32"})


def _stage(name: str | None, flavour: str) -> Stage:
    if flavour not in FLAVOURS:
        raise OptionError(
            f"{flavour!r} is not a flavour", at=f"flavour={flavour!r}", fix=f"flavours: {', '.join(FLAVOURS)}"
        )
    if name is None:
        return Stage.CANONICAL if flavour == "genai" else Stage.OPTIMIZED
    chosen = next((stage for stage in STAGES if stage.value == name), None)
    if chosen is None:
        known = ", ".join(stage.value for stage in STAGES)
        raise OptionError(f"{name!r} is not a stage that can be exported", at=f"stage={name!r}", fix=f"stages: {known}")
    return chosen


def _engine_of(model: object) -> Path | None:
    """The engine's directory, or None if the model is not an engine."""
    return Path(model) if isinstance(model, str | Path) and is_engine(Path(model)) else None


def _options_of(engine: Path, given: BuildOptions) -> BuildOptions:
    """The build options of an engine, in fp32. Raises OptionError if other options are given as well."""
    for name, value in given.model_dump(exclude_defaults=True).items():
        if name != "dtype":
            raise OptionError(
                "the options of a built engine cannot be changed",
                at=f"{name}={value}",
                fix="leave the option out, or export the model instead",
            )
    built = {**read_manifest(engine).options, "dtype": "auto", "kv_dtype": "auto"}
    return in_single_precision(parse_options(built))


def _export_engine(
    engine: Path, place: Path, stage: str | None, flavour: Flavour, given: BuildOptions, stages: Stages
) -> ExportReport:
    """The graph that an engine for onnxruntime runs. Raises OptionError for other engines, and for options that its
    graph does not satisfy."""
    if not (engine / MODEL_NAME).is_file():
        raise OptionError(
            "an engine's graphs are text, and its weights in the layouts of its kernels",
            at=engine,
            fix="name the model that it was built from too: --against MODEL",
        )
    if flavour != "standard" or stage not in (None, Stage.OPTIMIZED.value):
        raise OptionError(
            "an engine exports only its optimized graph, as a standard model",
            at=f"stage={stage}, flavour={flavour}",
            fix="name the model that it was built from too: --against MODEL",
        )
    _options_of(engine, given)
    from llmc.codegen.onnx.model_files import copy_engine_model

    with AtomicDirectory(place, _is_export, content="an exported model") as directory:
        opened = read_engine(engine, check_machine=False)
        with stages("weights", sum(slot.nbytes for slot in opened.program.weights)):
            written = copy_engine_model(opened, directory.path, stages.advance)
        for name in opened.files.below("tokenizer"):
            shutil.copyfile(engine / name, directory.path / Path(name).name)
        directory.commit()
    return ExportReport(place, Stage.OPTIMIZED.value, **asdict(written), seconds=stages.seconds)


def _is_export(path: Path) -> bool:
    from llmc.codegen.onnx.model_files import WEIGHTS_NAME

    return all((path / name).is_file() for name in (MODEL_NAME, WEIGHTS_NAME))


def _bytes(graph: ModelGraph) -> list[int]:
    from llmc.codegen.onnx.weights import onnx_weights

    return [weight.slot.nbytes for weight in onnx_weights(graph)]


def _config_of(directory: Path | None) -> tuple[Path, ...]:
    """The model's own config.json, where it is a directory."""
    file = None if directory is None else directory / _CONFIG
    return () if file is None or not file.is_file() else (file,)
