"""A model of 70B parameters cut for eight ranks, on a machine that could not hold it: seconds and memory.

    python -m benchmarks.plan_many_ranks [--model examples/configs/llama-3-70b] [--ranks 8] [--quantize int4:g32]

Plan and program are those of the whole model, made of its config.json alone: captured, cut by every pass, lowered and
compiled for this machine's CPU. Then the ranks' weights are written as a build writes them, layer by layer: numbers
of a synthetic checkpoint are rounded once, cut and packed for each rank, and each file is removed as soon as it is
whole. --layers writes the weights of fewer layers, since those of all take a while. Prints seconds and the process's
largest memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from benchmarks.synthetic_checkpoint import RoundedCheckpoint, layer_of, rounded_late
from llmc.api.build_stages import Stages
from llmc.codegen.stage_builds import StageBuild, stage_builds
from llmc.codegen.target_kind import TargetKind, kind_of
from llmc.codegen.weight_slots import CodesRecipe, SlotRecipe
from llmc.compiler import packed, run_passes
from llmc.engine_format.writer import EngineWriter
from llmc.frontends.capture import capture
from llmc.graph.finite_weights import FiniteWeights
from llmc.graph.weights import stored_names
from llmc.options import BuildOptions, parse_options
from llmc.passes.pipeline import default
from llmc.program import Program, WeightSlot
from llmc.targets import host_target

Part = tuple[WeightSlot, SlotRecipe]


@dataclass
class Record:
    """seconds: of each stage of the build. peak: bytes of memory when the program was there, and at the end.
    layers, written: whose weights were written, and their bytes on all ranks."""

    seconds: dict[str, float]
    rank_bytes: int
    launches: int
    plan_peak: int
    layers: int = 0
    written: int = 0
    peak: int = 0


def main() -> None:
    """Print what each stage took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("examples/configs/llama-3-70b"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--quantize", default="int4:g32")
    parser.add_argument("--layers", type=int, help="whose weights are written; default: all")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    gc.disable()  # As `llmc build` does.
    os.environ["LLMC_CAPTURE_CACHE"] = "0"
    options = parse_options({"tensor_parallel_size": given.ranks, "quantize": given.quantize})
    with tempfile.TemporaryDirectory() as folder:
        record = measured(given.model, options, Path(folder) / "engine.llmc", given.layers)
    for name, seconds in record.seconds.items():
        print(f"{name:10} {seconds:7.1f} s")
    print(f"{record.launches} launches, {record.rank_bytes / 1e9:.2f} GB of weights on each of {given.ranks} ranks")
    print(f"largest memory: {record.plan_peak / 1e9:.2f} GB of plan and program, {record.peak / 1e9:.2f} GB in all")
    print(f"weights of {record.layers} layers: {record.written / 1e9:.2f} GB")
    if given.json is not None:
        given.json.write_text(json.dumps({"command": sys.argv[1:], **asdict(record)}, indent=1) + "\n")


def measured(model: Path, options: BuildOptions, engine: Path, layers: int | None) -> Record:
    """Build all of it but the weights of the layers that are left out; nothing is kept."""
    kind, stages = kind_of(host_target()), Stages(None)
    with EngineWriter(engine) as writer, kind.builder(options) as builder:
        with stages("capture"):
            captured = capture(model, options, may_lack_weights=True)
        with stages("passes"):
            graph = run_passes(captured, default(), options, stages, kind)[0].graph
        with stage_builds(graph, kind, options, builder, writer, stages) as (build,):
            build.builder.finish(build.writer, stages)
            program = build.program
            rank_bytes = sum(slot.nbytes for slot in program.weights)
            record = Record(stages.seconds, rank_bytes, len(program.launches), plan_peak=peak_bytes())
            checkpoint = RoundedCheckpoint(captured.source, graph.quantized)
            with stages("weights"):
                for turn, (number, parts) in enumerate(of_layers(build, checkpoint)):
                    if number is not None and layers is not None and number >= layers:
                        continue
                    start, place = time.perf_counter(), writer.below(f"part{turn}/")
                    place.path.mkdir()
                    record.written += write_and_drop(parts, program, checkpoint, kind, place)
                    record.layers += number is not None
                    seconds = time.perf_counter() - start
                    print(f"layer {number}: {seconds:.1f} s, at most {peak_bytes() / 1e9:.2f} GB", flush=True)
    record.peak = peak_bytes()
    return record


def of_layers(build: StageBuild, checkpoint: RoundedCheckpoint) -> Iterator[tuple[int | None, list[Part]]]:
    """The weights of a layer, in the order of the program; None for what is not in a layer."""
    parts = [
        (slot, rounded_late(recipe, checkpoint))
        for slot, recipe in zip(build.program.weights, build.recipes, strict=True)
    ]
    for number, of_one in groupby(parts, lambda part: layer_of(_names(part[1]))):
        yield number, list(of_one)


def _names(recipe: SlotRecipe) -> tuple[str, ...]:
    return stored_names(recipe.parts["codes"] if isinstance(recipe, CodesRecipe) else recipe)


def write_and_drop(
    parts: list[Part], program: Program, checkpoint: RoundedCheckpoint, kind: TargetKind, writer: EngineWriter
) -> int:
    """Files of each rank, one after the other; how many bytes they had."""
    finite, written = FiniteWeights(), 0
    for rank in range(program.ranks):
        makers = [(slot, partial(packed, slot, recipe, checkpoint, finite, kind, rank)) for slot, recipe in parts]
        writer.write_weights(makers, rank=rank)
        for file in (writer.path / "weights").iterdir():
            written += file.stat().st_size
            file.unlink()
    checkpoint.forget()
    return written


def peak_bytes() -> int:
    """The most memory that the process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
