"""Tuning without a GPU: which variants there are, which wins, and the engine that is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from llmc.codegen.triton.launch_alternatives import launch_alternatives
from llmc.engine_format import EngineDirectory, Manifest, ModelRecord, TargetRecord, read_engine
from llmc.engine_format.writer import EngineWriter
from llmc.errors import EngineFormatError, TargetError
from llmc.program import Alternative, Launch, RowCount, RowRange
from llmc.program.program_json import program_to_json
from llmc.runtime.device.inputs import StepShape, example_step
from llmc.tuning.choice import fastest
from llmc.tuning.steps import shape_of, steps_of
from llmc.tuning.tune import tune, write_tuned
from llmc.tuning.variants import distinct, variants
from llmc.tuning.ways import choose_ways
from tests.runtime.device.device_program import LIMITS, binary, kernel, program


def written_engine(path: Path, *archs: str) -> EngineDirectory:
    model = ModelRecord("m", "module", 1000, None, "bfloat16", None, (), 1)
    manifest = Manifest("0", model, TargetRecord("h100", None, ()), {}, LIMITS, {}, {}, ())
    with EngineWriter(path) as writer:
        writer.write_text("program.json", program_to_json(program(*archs)))
        writer.write_text("kernels/k.py", "source\n")
        for arch in archs:
            writer.write_bytes(f"kernels/k.0.{arch}.cubin", b"untuned")
        slots = program(*archs).weights
        writer.write_weights([(slot, partial(bytes, slot.nbytes)) for slot in slots])
        writer.finish(manifest)
    return read_engine(path)


def test_variants_differ_in_warps_and_stages_only() -> None:
    own = kernel("sm_90")
    others = variants(own)
    assert {(v.num_warps, v.num_stages) for v in others} == {
        (w, s) for w in (2, 4, 8) for s in (1, 2, 3) if (w, s) != (own.num_warps, own.num_stages)
    }
    for v in others:
        assert replace(v, name=own.name, num_warps=4, num_stages=2, binaries=own.binaries) == own
    assert len({v.name for v in others}) == len(others)


def test_one_variant_with_each_machine_code_is_measured(tmp_path: Path) -> None:
    """Stages change nothing in a kernel without a loop that the compiler pipelines."""
    own = kernel("sm_90")
    codes = {(w, s): b"%d warps" % w for w in (2, 4, 8) for s in (1, 2, 3)}
    compiled = []
    (tmp_path / "kernels").mkdir()
    (tmp_path / own.binaries["sm_90"].file).write_bytes(codes[4, 2])
    for variant in variants(own):
        file = f"kernels/{variant.name}.sm_90.cubin"
        (tmp_path / file).write_bytes(codes[variant.num_warps, variant.num_stages])
        compiled.append(replace(variant, binaries={"sm_90": replace(binary("sm_90"), file=file)}))
    assert [(x.num_warps, x.num_stages) for x in distinct(own, compiled, tmp_path)] == [(2, 1), (8, 1)]
    assert len(distinct(replace(own, binaries={}), compiled, tmp_path)) == 3


def test_a_variant_must_win_by_more_than_noise() -> None:
    assert fastest({"own": 1.0, "a": 0.98, "b": 1.2}, "own") == "own"
    assert fastest({"own": 1.0, "a": 0.9, "b": 0.8}, "own") == "b"


@pytest.mark.parametrize("in_place", [True, False])
def test_the_tuned_engine_has_the_chosen_binary(tmp_path: Path, in_place: bool) -> None:
    engine = written_engine(tmp_path / "e.llmc", "sm_80", "sm_90")
    variant = variants(engine.program.kernels[0])[0]
    fast = replace(binary("sm_90"), file=f"kernels/{variant.name}.sm_90.cubin", threads=64)
    (tmp_path / "scratch/kernels").mkdir(parents=True)
    (tmp_path / "scratch" / fast.file).write_bytes(b"tuned")
    output = engine.path if in_place else tmp_path / "tuned.llmc"
    (own,) = engine.programs
    write_tuned(engine, own, {"k.0": replace(variant, binaries={"sm_90": fast})}, tmp_path / "scratch", output)
    tuned = read_engine(output)
    (tuned_kernel,) = tuned.program.kernels
    assert (tuned_kernel.name, tuned_kernel.num_warps, tuned_kernel.num_stages) == (
        "k.0",
        variant.num_warps,
        variant.num_stages,
    )
    assert tuned_kernel.binaries["sm_90"] == replace(fast, file="kernels/k.0.sm_90.cubin")
    assert (output / "kernels/k.0.sm_90.cubin").read_bytes() == b"tuned"
    assert (output / "kernels/k.0.sm_80.cubin").read_bytes() == b"untuned"
    assert tuned.program.launches == engine.program.launches


def test_a_way_must_win_its_site_by_more_than_noise() -> None:
    base = program("sm_90")
    (launch,) = base.launches
    kernels = (*base.kernels, *(replace(kernel(), name=f"k.{i}") for i in (1, 2)))
    others = tuple(Alternative(0, 0, (replace(launch, kernel=f"k.{i}"),), ()) for i in (1, 2))
    site = replace(base, kernels=kernels, alternatives=others)
    told: list[str] = []

    def measured(times: dict[str, float]) -> Callable[[Sequence[Launch], StepShape], float]:
        return lambda launches, shape: times[launches[0].kernel]

    winners, results = choose_ways(site, others, measured({"k.0": 2e-6, "k.1": 1.99e-6, "k.2": 1e-6}), told.append)
    assert winners == [others[1]] and results[0].what == "k.2" and "k.2: 1.0 µs" in told[0]
    winners, results = choose_ways(site, others, measured({"k.0": 2e-6, "k.1": 1.99e-6, "k.2": 3e-6}), told.append)
    assert winners == [] and results[0].after == results[0].before


def test_the_engine_gets_the_adopted_kernel_and_drops_the_other(tmp_path: Path) -> None:
    engine = written_engine(tmp_path / "e.llmc", "sm_90")
    (own,) = engine.programs
    (launch,) = own.program.launches
    fast = replace(kernel(), name="k.1", binaries={"sm_90": replace(binary("sm_90"), file="kernels/k.1.sm_90.cubin")})
    way = Alternative(0, 0, (replace(launch, kernel="k.1"),), ())
    tuned = launch_alternatives(replace(own.program, kernels=(*own.program.kernels, fast), alternatives=(way,)), [way])
    (tmp_path / "scratch/kernels").mkdir(parents=True)
    (tmp_path / "scratch/kernels/k.1.sm_90.cubin").write_bytes(b"adopted")
    write_tuned(engine, replace(own, program=tuned), {}, tmp_path / "scratch", tmp_path / "tuned.llmc")
    reopened = read_engine(tmp_path / "tuned.llmc")
    assert [x.kernel for x in reopened.program.launches] == ["k.1"]
    assert (reopened.path / "kernels/k.1.sm_90.cubin").read_bytes() == b"adopted"
    assert not (reopened.path / "kernels/k.0.sm_90.cubin").exists()
    assert [x.kernel for x in reopened.program.alternatives[0].launches] == ["k.0"]


@pytest.mark.parametrize(
    ("only", "shape"),
    [
        (None, (512, 1, 1)),
        (RowRange(RowCount.TOKENS, 1, 1), (1, 1, 1)),
        (RowRange(RowCount.TOKENS, 5, 16), (16, 16, 16)),
        (RowRange(RowCount.TOKENS, 129, 256), (256, 1, 1)),
        (RowRange(RowCount.LOGIT_ROWS, 5, None), (32, 32, 1)),
    ],
)
def test_ways_are_measured_in_the_largest_step_that_has_them(
    only: RowRange | None, shape: tuple[int, int, int]
) -> None:
    step = shape_of(only, LIMITS)
    assert (step.tokens, step.logit_rows, step.requests) == shape


def test_every_range_of_rows_has_a_step_in_which_its_kernels_are_measured() -> None:
    base = program("sm_90")
    (launch,) = base.launches
    edges = ((1, 1), (2, 2), (3, 4), (5, 16), (17, 32), (33, 128), (129, None))
    ranges = [RowRange(RowCount.TOKENS, first, last) for first, last in edges]
    ranges.append(RowRange(RowCount.LOGIT_ROWS, 2, 5))
    steps = steps_of(replace(base, launches=tuple(replace(launch, only=only) for only in ranges)))
    for only in ranges:
        assert any(only.holds(tokens=s.tokens, logit_rows=s.logit_rows) for s in steps), only
    assert len(steps) == len(set(steps))


def test_decodes_of_mixed_steps_have_a_step_with_decodes() -> None:
    steps = steps_of(program("sm_90"))
    mixed = next(s for s in steps if s.tokens > s.requests)
    lengths = np.diff(example_step(mixed, LIMITS, 300).query_starts)
    assert mixed.requests > 1 and sorted(lengths) == [1] * (mixed.requests - 1) + [2]


def test_example_steps_stay_within_the_cache() -> None:
    columns = LIMITS.max_model_len // LIMITS.block_size
    for shape in (StepShape(1, 1, 1, columns), StepShape(24, 24, 24, columns), StepShape(512, 1, 1, columns)):
        step = example_step(shape, LIMITS, 300)
        assert StepShape.of(step) == shape
        assert step.positions.max() == LIMITS.max_model_len - 1
        assert step.slot_mapping.min() >= 0 and step.slot_mapping.max() < 300 * LIMITS.block_size
        assert (np.diff(step.query_starts) == shape.tokens // shape.requests).all()


def test_only_a_gpu_engine_on_a_gpu_is_tuned(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        engine = written_engine(tmp_path / "e.llmc", "sm_90")
        with pytest.raises(TargetError, match="there is none to run it on"):
            tune(engine.path, tmp_path / "out.llmc", print)
    assert not (tmp_path / "out.llmc").exists()
    with pytest.raises(EngineFormatError):
        tune(tmp_path / "missing.llmc", tmp_path / "out.llmc", print)
