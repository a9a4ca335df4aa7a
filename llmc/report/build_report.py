"""Results of a build: the manifest of the engine, and the report that the command line prints."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from llmc import engine_format
from llmc.api.version import VERSION
from llmc.engine_format import Manifest, ModelRecord, TargetRecord
from llmc.formats.pruned_part import PrunedPart
from llmc.formats.quantized_weight import QuantizedWeight
from llmc.formats.sparse_weight import SparseWeight
from llmc.graph.dtype_names import torch_name
from llmc.graph.model_graph import ModelInfo
from llmc.graph.pass_record import PassRecord
from llmc.options import BuildOptions
from llmc.passes.runner import PipelineResult
from llmc.plural import counted
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.step_launches import step_launches
from llmc.prediction.step_shape import StepShape
from llmc.program import DeviceBinary, Program, state_bytes
from llmc.targets import Target


@dataclass(frozen=True)
class BuildReport:
    """The figures of a build for its closing table. Sizes are in bytes, times in seconds.

    Attributes:
        path: The engine directory.
        target: The target that it was built for.
        passes: The record of each pass.
        kernels: Number of launches of each kernel in a step of one token.
        binaries: GPU binaries by kernel and instruction set.
        engine_bytes: Size of the directory.
        weight_bytes: Size of the weights in it.
        arena_bytes: Size of the arena that intermediates share.
        unplanned_bytes: Size of the intermediates if each had its own memory.
        fitting_sequences: Number of sequences of max_model_len tokens that fit into a GPU's memory with the engine;
            None for a CPU.
        decode_bytes: Bytes that a step with a single token at a context of 1 moves.
        program: The launches of a step, in all stages.
        seconds: Times by stage of the build.
        quantized: The outcome for each quantized weight.
        sparse: The outcome for each weight with zeros.
        pruned: The removed share of each part.
        kv_bytes: Bytes of the KV cache per token.
        warnings: One line per fact that users may not expect.
    """

    path: Path
    target: Target
    passes: tuple[PassRecord, ...]
    kernels: Counter[str]
    binaries: dict[str, dict[str, DeviceBinary]]
    engine_bytes: int
    weight_bytes: int
    arena_bytes: int
    unplanned_bytes: int
    fitting_sequences: int | None
    decode_bytes: float
    program: Program
    seconds: dict[str, float]
    quantized: tuple[QuantizedWeight, ...]
    sparse: tuple[SparseWeight, ...]
    pruned: tuple[PrunedPart, ...]
    kv_bytes: int
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rewrites = sum(len(record.rewrites) for record in self.passes)
        seconds = sum(self.seconds.values())
        return f"<BuildReport of {self.path} for {self.target.name}: {counted(rewrites, 'rewrite')}, {seconds:.1f} s>"


def build_report(
    path: Path,
    target: Target,
    result: PipelineResult,
    program: Program,
    manifest: Manifest,
    seconds: dict[str, float],
    warnings: tuple[str, ...],
    fitting_sequences: int | None,
) -> BuildReport:
    """The report of a finished build. manifest: as written, with its files."""
    return BuildReport(
        path=path,
        target=target,
        passes=result.records,
        kernels=Counter(program.launches[i].kernel for i, _ in step_launches(program.launches, StepShape.decode(1, 1))),
        binaries={kernel.name: kernel.binaries for kernel in program.launched_kernels()},
        engine_bytes=sum(record.bytes for record in manifest.files.values()),
        weight_bytes=manifest.memory["weights"],
        arena_bytes=manifest.memory["arena"],
        unplanned_bytes=manifest.memory["arena_unplanned"],
        fitting_sequences=fitting_sequences,
        decode_bytes=manifest.cost["decode_bytes"],
        program=program,
        seconds=seconds,
        quantized=result.graph.quantized,
        sparse=result.graph.sparse,
        pruned=result.graph.pruned,
        kv_bytes=manifest.memory["kv_per_token"],
        warnings=warnings,
    )


def manifest_of(
    info: ModelInfo, target: Target, options: BuildOptions, program: Program, records: Sequence[PassRecord]
) -> Manifest:
    """The manifest of an engine; EngineWriter adds the files. program: covers all stages."""
    limits = program.limits
    step = StepShape.decode(requests=1, context=1).values()
    decode = [launch for launch in program.launches if launch.runs(tokens=1, logit_rows=1)]
    largest = {"tokens": limits.max_batch_tokens, "logit_rows": limits.max_logit_rows}
    return Manifest(
        llmc_version=VERSION,
        model=ModelRecord(
            name=info.name,
            family=info.family,
            vocab_size=info.vocab_size,
            max_positions=info.max_positions,
            dtype=torch_name(info.dtype),
            bos_token_id=info.bos_token_id,
            eos_token_ids=info.eos_token_ids,
            parameters=sum(prod(slot.shape) for slot in program.weights),
            head=info.head,
        ),
        target=TargetRecord.of(target),
        options=options.model_dump(mode="json"),
        limits=limits,
        cost={
            "decode_bytes": sum(evaluate_expression(launch.bytes_moved, step) for launch in decode),
            "decode_flops": sum(evaluate_expression(launch.flops, step) for launch in decode),
        },
        memory={
            "weights": sum(slot.nbytes for slot in program.weights),
            "arena": program.arena.at(**largest),
            "arena_unplanned": program.unplanned_arena.at(**largest),
            "kv_per_token": sum(program.token_bytes()),
            "states_per_sequence": state_bytes(program.states),
        },
        passes=tuple(engine_format.PassRecord(r.name, len(r.rewrites), len(r.refusals)) for r in records),
    )
