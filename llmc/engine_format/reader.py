"""Open an engine directory: check that it is whole, unchanged and made for this machine, before anything in it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmc.engine_format.engine_files import WEIGHTS, EngineFiles, is_weights
from llmc.engine_format.engine_kinds import PROGRAM_NAME, kind_of_engine
from llmc.engine_format.manifest import MANIFEST_NAME, Manifest, TargetRecord, read_manifest
from llmc.engine_format.program_check import check_program
from llmc.engine_format.weight_check import WeightCheck, compare_hashes
from llmc.engine_format.weight_file import StoredTensor, check_slot, read_header
from llmc.errors import EngineFormatError, TargetError
from llmc.files.locked_directory import TEMPORARY_SUFFIX
from llmc.files.typed_json import REBUILD
from llmc.formats.pruned_part import PrunedPart
from llmc.formats.quantized_weight import QuantizedWeight
from llmc.formats.sparse_weight import SparseWeight
from llmc.program import Program, RankLayout
from llmc.program.joined_program import joined_program
from llmc.program.program_json import program_from_json
from llmc.targets import CpuTarget, missing_features

# The programs of an engine's further GPUs: PROGRAMS/TARGET.json.
PROGRAMS = "programs"
# The quantization of each weight; absent if nothing is quantized.
QUANTIZATION_NAME = "report/quantization.json"
SPARSITY_NAME = "report/sparsity.json"
PRUNING_NAME = "report/pruning.json"
# The page of `llmc report`, and the text of `llmc explain`; an engine that a build did not write may have none.
REPORT_NAME = "report/report.html"
EXPLANATION_NAME = "report/explain.txt"
# Records of the passes, coverage, the resulting graphs, and the provenance of nodes.
PASSES_NAME = "report/passes.json"
PLACEMENTS_NAME = "report/placements.json"
COVERAGE_NAME = "report/coverage.json"
GRAPHS = "report/graphs"
NODES_NAME = "report/nodes.json"
# The engine of the drafter. If its vocabulary differs, a file maps its tokens to ids of this engine, in int32.
DRAFT = "draft"
DRAFT_IDS_NAME = "draft_ids.bin"
# Which of such an engine's weights lie in the one around it: their names there, by their own.
SHARED_NAME = "shared_weights.json"
# Files of pipeline stages after the first, except weights: STAGES/NUMBER/.
STAGES = "stages"


@dataclass(frozen=True)
class EngineDirectory:
    """A checked engine.

    Attributes:
        files: The files of the engine.
        manifest: The manifest of the engine.
        program: This stage's program for the first target. The stage is the first, or that of a rank (`of_rank`).
        executable: The library, graph or program that an executor opens for the stage.
        tensors: The location of each of program.weights, in the same order.
        programs: For an engine for several GPUs, the stage's program for each target, with its file.
        stages: Each pipeline stage, the first included.
    """

    files: EngineFiles
    manifest: Manifest
    program: Program
    executable: Path
    tensors: tuple[StoredTensor, ...]
    programs: "tuple[TargetProgram, ...]" = ()
    stages: "tuple[StageProgram, ...]" = ()

    @property
    def whole_program(self) -> Program:
        """The program of all stages, for inspection."""
        return joined_program(self.stage_programs)

    @property
    def whole_programs(self) -> "tuple[TargetProgram, ...]":
        """The program of all stages for each target, for inspection.

        Returns:
            A program for each target, in the order of `programs`, with the file of its first stage.
        """
        if len(self.stages) < 2:
            return self.programs
        by_target = zip(*(stage.programs for stage in self.stages), strict=True)
        return tuple(replace(made[0], program=joined_program([stage.program for stage in made])) for made in by_target)

    @property
    def stage_programs(self) -> tuple[Program, ...]:
        """The program of each stage, in order."""
        return tuple(stage.program for stage in self.stages) or (self.program,)

    def with_one_table(self) -> "EngineDirectory":
        """The engine with the same number of blocks for every cache group, so that one block table serves all."""
        return replace(
            self,
            program=self.program.with_one_table(),
            programs=_with_one_table(self.programs),
            stages=tuple(
                replace(stage, program=stage.program.with_one_table(), programs=_with_one_table(stage.programs))
                for stage in self.stages
            ),
        )

    @property
    def path(self) -> Path:
        return self.files.path

    def weight_file(self, stored: StoredTensor) -> memoryview:
        """The bytes of the file that a tensor lies in, of this engine or of the one around it."""
        owner = stored.path.parents[1]
        files = self.files if owner == self.path else engine_files(owner)
        return files.mapped(str(stored.path.relative_to(owner)))


@dataclass(frozen=True)
class TargetProgram:
    """A GPU's program. file: its path in the engine."""

    target: str
    file: str
    program: Program


def _with_one_table(programs: Sequence[TargetProgram]) -> tuple[TargetProgram, ...]:
    return tuple(replace(made, program=made.program.with_one_table()) for made in programs)


@dataclass(frozen=True)
class StageProgram:
    """A pipeline stage's program, and what an executor opens for it. programs: as in EngineDirectory."""

    program: Program
    executable: Path
    programs: "tuple[TargetProgram, ...]" = ()


def read_engine(path: Path, *, check_weights: bool = True, check_machine: bool = True) -> EngineDirectory:
    """Check an engine directory and describe it; nothing of it is executed.

    check_weights: compare the weights' SHA-256 too (their sizes always are). check_machine: refuse an engine that this
    machine cannot run; False is for looking only. Raises EngineFormatError for a directory that is not a whole,
    unchanged engine of this format version, TargetError if this machine lacks instructions.
    """
    files, manifest = _open(path)
    directory = _describe(files, manifest, check_machine=check_machine)
    compare_hashes(files, [name for name in files.records if check_weights or not is_weights(name)])
    return directory


def start_engine(path: Path) -> tuple[EngineDirectory, WeightCheck]:
    """Read an engine as `read_engine` does for any machine, but check what no start needs meanwhile and afterwards, the
    weights by XXH3: see WeightCheck."""
    files, manifest = _open(path)
    check = WeightCheck(files)
    try:
        return _describe(files, manifest, check_machine=False), check
    except BaseException:
        check.cancel()
        raise


def engine_to_run(path: Path, *, check_weights: bool) -> tuple[EngineDirectory, WeightCheck | None]:
    """Open an engine like `start_engine`. check_weights: Whether to compare its weights."""
    return start_engine(path) if check_weights else (read_engine(path, check_weights=False, check_machine=False), None)


def engine_files(path: Path) -> EngineFiles:
    """The files of an engine, each of which is checked when it is read. Raises EngineFormatError."""
    return _open(path)[0]


def _open(path: Path) -> tuple[EngineFiles, Manifest]:
    try:
        check_directory(path)
        manifest = read_manifest(path)
    except OSError as error:
        raise EngineFormatError(
            f"cannot read the engine: {error.strerror}",
            at=error.filename or path,
            fix="check the path, its permissions and the disk",
        ) from None
    files = EngineFiles(path, manifest.files)
    for name in files.records:
        files.check(name)
    return files, manifest


def _describe(files: EngineFiles, manifest: Manifest, *, check_machine: bool) -> EngineDirectory:
    first, *further = _stages(files, manifest)
    program, executable, programs = first.program, first.executable, first.programs
    tensors = find_weights(files, program)
    if check_machine:
        check_target(files.path, manifest.target)
    return EngineDirectory(files, manifest, program, executable, tensors, programs, (first, *further))


def stage_folder(stage: int) -> str:
    """The directory of the program and the library of a pipeline stage after the first."""
    return f"{STAGES}/{stage}/"


def _stages(files: EngineFiles, manifest: Manifest) -> list[StageProgram]:
    """The stages, each of which continues where the one before ends, whichever of its targets each runs on."""
    stages: list[StageProgram] = []
    layout = RankLayout()
    width: int | None = None
    while len(stages) < layout.pipeline:
        number = len(stages)
        folder = stage_folder(number) if number else ""
        programs = read_programs(files, manifest, folder)
        program = programs[0].program
        if number == 0:
            layout = program.layout
        taken = program.hidden_width if width is None else width
        _check_stage(files, programs, (layout, number, taken, program.hands_over))
        stages.append(StageProgram(program, _executable(files, manifest, folder), programs))
        width = program.hands_over
    return stages


def _check_stage(
    files: EngineFiles, programs: Sequence[TargetProgram], expected: tuple[RankLayout, int, int, int]
) -> None:
    """Compare each target's program of a stage. expected: the layout, the number of the stage, and how many numbers per
    token it takes over and hands over. Raises EngineFormatError."""
    layout, stage, taken, given = expected
    for made in programs:
        program = made.program
        if (program.layout, program.stage, program.hidden_width, program.hands_over) != expected:
            raise EngineFormatError(
                f"stage {stage} of {layout} takes {taken} and hands over {given} numbers per token; this is stage "
                f"{program.stage} of {program.layout}, which takes {program.hidden_width} and hands over "
                f"{program.hands_over}",
                at=files.path / made.file,
                fix=REBUILD,
            )


def read_quantization(files: EngineFiles) -> tuple[QuantizedWeight, ...]:
    """The quantization of each weight of an engine, complete or being written; empty if nothing is quantized. Raises
    EngineFormatError."""
    return files.parsed(QUANTIZATION_NAME, tuple[QuantizedWeight, ...]) if QUANTIZATION_NAME in files else ()


def read_sparsity(files: EngineFiles) -> tuple[SparseWeight, ...]:
    """The record of each weight with zeros; empty if there are none. Raises EngineFormatError."""
    return files.parsed(SPARSITY_NAME, tuple[SparseWeight, ...]) if SPARSITY_NAME in files else ()


def read_pruning(files: EngineFiles) -> tuple[PrunedPart, ...]:
    """The record of each pruned part of a model; empty if nothing was pruned. Raises EngineFormatError."""
    return files.parsed(PRUNING_NAME, tuple[PrunedPart, ...]) if PRUNING_NAME in files else ()


def check_directory(path: Path) -> None:
    """Raise EngineFormatError if there is no engine at the path."""
    fix = "name a directory that `llmc build` made, such as MODEL.llmc"
    if not path.exists():
        raise EngineFormatError("there is no such engine", at=path, fix=fix)
    if not path.is_dir():
        raise EngineFormatError("an engine is a directory, this is a file", at=path, fix=fix)
    if path.name.endswith(TEMPORARY_SUFFIX):
        raise EngineFormatError("an unfinished build left this directory behind", at=path, fix="build the engine again")
    if not (path / MANIFEST_NAME).exists():
        kind = "a model directory, not an engine" if (path / "config.json").exists() else "not an engine"
        build = f"build one: llmc build {path} -o {path.name or 'model'}.llmc"
        raise EngineFormatError(
            f"the directory has no {MANIFEST_NAME}: it is {kind}",
            at=path,
            fix=build if (path / "config.json").exists() else fix,
        )


def _executable(files: EngineFiles, manifest: Manifest, folder: str = "") -> Path:
    """The executable file of the first stage, or of the stage in a folder. For a GPU engine it is the program."""
    executed = kind_of_engine(manifest.target.name).executed
    own = [name.removeprefix(folder) for name in manifest.files if name.startswith(folder)]
    executables = [folder + name for name in own if executed.fullmatch(name)]
    if len(executables) != 1:
        raise EngineFormatError(
            f"the manifest lists {len(executables)} files to execute, an engine has one",
            at=files.path / MANIFEST_NAME,
            fix=REBUILD,
        )
    files.read(executables[0])  # It is not the executor that compares it.
    return files.path / executables[0]


def read_programs(files: EngineFiles, manifest: Manifest, folder: str = "") -> tuple[TargetProgram, ...]:
    """The program of the stage in a folder, or one for each GPU that the engine was built for; they have the same
    weights."""
    names = manifest.target.name.split(",")
    places = [f"{folder}{place}" for place in (PROGRAM_NAME, *(f"{PROGRAMS}/{name}.json" for name in names[1:]))]
    programs = [TargetProgram(name, at, _program(files, manifest, at)) for name, at in zip(names, places, strict=True)]
    for other in programs[1:]:
        if other.program.weights != programs[0].program.weights:
            raise EngineFormatError(
                f"{other.file} has other weights than {PROGRAM_NAME}", at=files.path / other.file, fix=REBUILD
            )
    return tuple(programs)


def _program(files: EngineFiles, manifest: Manifest, name: str) -> Program:
    """Read the program of a file and check that it is consistent in itself and with the manifest."""
    program = program_from_json(files.text(name), files.path / name)
    if manifest.limits != program.limits or manifest.model.row_width != program.vocab_size:
        raise EngineFormatError(
            f"the manifest gives {manifest.limits} and rows of {manifest.model.row_width} numbers, "
            f"the program {program.limits} and {program.vocab_size}",
            at=files.path / name,
            fix=REBUILD,
        )
    for kernel in program.kernels:
        source = () if kernel.is_library else (kernel.source,)
        for file in (*source, *(name for binary in kernel.binaries.values() for name in binary.files)):
            if file not in manifest.files:
                raise EngineFormatError(
                    f"the manifest lists no {file} of kernel {kernel.name}", at=files.path / MANIFEST_NAME, fix=REBUILD
                )
    check_program(program, files.path / name)
    return program


def of_rank(engine: EngineDirectory, rank: int) -> EngineDirectory:
    """The part of an engine that a rank runs: the program of its stage, and the rank's weights."""
    stage = engine.stages[engine.program.layout.stage_of(rank)]
    tensors = find_weights(engine.files, stage.program, rank)
    return replace(engine, program=stage.program, executable=stage.executable, tensors=tensors, programs=stage.programs)


def find_weights(files: EngineFiles, program: Program, rank: int = 0) -> tuple[StoredTensor, ...]:
    """The place of each weight of a rank's program. Missing or unfitting weights raise EngineFormatError."""
    stored = _stored_tensors(files, rank)
    for slot in program.weights:
        if slot.name not in stored:
            raise EngineFormatError(f"no weight file holds {slot.name!r}", at=files.path / "weights", fix=REBUILD)
        check_slot(slot, stored[slot.name])
    return tuple(stored[slot.name] for slot in program.weights)


def _stored_tensors(files: EngineFiles, rank: int) -> dict[str, StoredTensor]:
    """The stored tensors of a rank by name, including those shared with the enclosing engine."""
    stored: dict[str, StoredTensor] = {}
    for name in files.below("weights"):
        if name.startswith(f"{WEIGHTS}rank{rank}-"):
            stored.update(read_header(files.mapped(name), files.path / name))
    if SHARED_NAME not in files:
        return stored
    theirs = _stored_tensors(engine_files(files.path.parent), rank)
    for own, name in files.parsed(SHARED_NAME, dict[str, str]).items():
        if name not in theirs:
            raise EngineFormatError(
                f"weight {own!r} is shared with the enclosing engine, which has no weight {name!r}",
                at=files.path / SHARED_NAME,
                fix=REBUILD,
            )
        stored[own] = theirs[name]
    return stored


def check_target(path: Path, target: TargetRecord) -> None:
    """Raise TargetError naming the instructions that this machine lacks."""
    # Only records of CPUs name instructions. For a GPU, the executor compares the device with the binaries.
    lacking = missing_features(CpuTarget(target.name, target.machine, frozenset(target.features), (), ""))
    if lacking:
        raise TargetError(
            f"the engine was built for {target.name}; this machine lacks {', '.join(lacking)}",
            at=path,
            fix="rebuild it for this machine: llmc build MODEL --target cpu -o ENGINE",
        )
