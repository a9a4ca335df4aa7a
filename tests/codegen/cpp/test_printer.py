"""The text of generated loops and of a whole engine, as people read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmc.codegen.cpp.lowering import lower
from llmc.codegen.cpp.printer import print_loop
from llmc.codegen.cpp.step import print_source
from llmc.codegen.kernel_ir import Apply, Constant, Load, Loop, Parameter, Reduce, Store, collapse
from llmc.graph.pointwise import Kind
from llmc.options import BuildOptions
from llmc.program import LOOP, Affine, Launch, Origin, Program, RowCount, SideOutput, StepOutput
from llmc.targets import CPU_TARGETS
from tests.codegen.tiny_models import gemma2
from tests.runtime.device.device_program import LIMITS

Golden = Callable[[str, str], None]

NORM = Loop(
    RowCount.TOKENS,
    (4, 16),
    (
        Parameter("BF16", (192, 16, 1), False),
        Parameter("F32", (0, 0, 1), False),
        Parameter("BF16", (64, 16, 1), True),
    ),
    (
        Load(0, Kind.FLOAT),
        Apply("square", (0,), Kind.FLOAT),
        Reduce("mean", 1),
        Constant(1e-5, Kind.FLOAT),
        Apply("add", (2, 3), Kind.FLOAT),
        Apply("rsqrt", (4,), Kind.FLOAT),
        Apply("mul", (0, 5), Kind.FLOAT),
        Load(1, Kind.FLOAT),
        Apply("mul", (6, 7), Kind.FLOAT),
        Store(2, 8),
    ),
)


def test_a_norm_per_head(golden: Golden) -> None:
    golden("codegen/norm_loop.cpp", print_loop("loop_0_norm", NORM, "mul  (#3 fuse_something)\nmodel.py:12 in forward"))


def test_an_engine(golden: Golden) -> None:
    portable = next(target for target in CPU_TARGETS if target.name == "cpu-portable")
    lowered = lower(gemma2()[0], portable, BuildOptions())
    golden("codegen/gemma2_engine.cpp", lowered.source)


def test_a_launch_for_side_outputs_and_one_in_their_place() -> None:
    launch, all_tokens = Launch("copy", LOOP, ("F32",), {}, Origin((), None, None), "0", "0"), ("first", "last")
    launches = (
        replace(launch, sides=("last",)),
        replace(launch, unless=all_tokens),
        replace(launch, wanted=(StepOutput.BEST,)),
    )
    sides = tuple(SideOutput(name, "F32", RowCount.TOKENS, (4,), None) for name in all_tokens)
    program = Program(LIMITS, 10, Affine(), Affine(), (), (), (), launches, side_outputs=sides)
    text = print_source(program, {}, "tiny")
    conditions = [line.strip() for line in text.splitlines() if " if (" in line]
    assert "if (step->sides & (2 /* last */)) {" in conditions
    assert "if (!(step->sides & (1 /* first */ | 2 /* last */))) {" in conditions
    assert "if (choices != nullptr) {" in conditions


def test_phases_of_a_norm() -> None:
    assert NORM.phases == (0, 0, 1, 0, 1, 1, 1, 0, 1, 1)
    assert NORM.per_column == (True, True, False, False, False, False, True, True, True, True)


@pytest.mark.parametrize(
    ("dims", "strides", "collapsed", "walked"),
    [
        ((4, 8), [(64, 8, 1), (32, 8, 1)], (32,), [(64, 1), (32, 1)]),
        ((4, 8), [(64, 16, 1), (32, 8, 1)], (4, 8), [(64, 16, 1), (32, 8, 1)]),
        ((4, 8), [(0, 0, 0), (32, 8, 1)], (32,), [(0, 0), (32, 1)]),
        ((4, 8), [(4, 1, 0), (32, 8, 1)], (4, 8), [(4, 1, 0), (32, 8, 1)]),
        ((1, 8, 1), [(64, 99, 1, 5), (8, 0, 1, 0)], (8,), [(64, 1), (8, 1)]),
        ((2, 4, 8), [(64, 32, 8, 1), (0, 0, 8, 1)], (2, 32), [(64, 32, 1), (0, 0, 1)]),
    ],
)
def test_axes_that_are_walked_as_one_are_joined(
    dims: tuple[int, ...], strides: list[tuple[int, ...]], collapsed: tuple[int, ...], walked: list[tuple[int, ...]]
) -> None:
    parameters = (Parameter("F32", strides[0], False), Parameter("F32", strides[1], True))
    loop = collapse(Loop(RowCount.TOKENS, dims, parameters, (Load(0, Kind.FLOAT), Store(1, 0))))
    assert loop.dims == collapsed
    assert [p.strides for p in loop.parameters] == walked


def test_columns_of_a_reduction_are_not_joined() -> None:
    assert collapse(NORM).dims == (4, 16)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.1, Kind.FLOAT, "0.1f"),
        (-2, Kind.FLOAT, "(-2.0f)"),
        (float("-inf"), Kind.FLOAT, "(-INFINITY)"),
        (float("nan"), Kind.FLOAT, "NAN"),
        (-3, Kind.INT, "(-3)"),
        (True, Kind.BOOL, "true"),
    ],
)
def test_numbers_are_printed_exactly(value: float, kind: Kind, text: str) -> None:
    add = Apply("where" if kind is Kind.BOOL else "add", (1, 0, 0) if kind is Kind.BOOL else (0, 1), Kind.FLOAT)
    parameters = (Parameter("F32", (8, 1), False), Parameter("F32", (8, 1), True))
    loop = Loop(RowCount.ONE, (8,), parameters, (Load(0, Kind.FLOAT), Constant(value, kind), add, Store(1, 2)))
    printed = print_loop("f", loop, "")
    assert f"= {text} ? v0 : v0;" in printed if kind is Kind.BOOL else f"= v0 + {text};" in printed
