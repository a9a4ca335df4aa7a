"""Programs survive the way through program.json, and nothing else passes for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import EngineFormatError
from llmc.program import Affine, Buffer, CacheSlot, Launch, Layout, Limits, Origin, Program, RowCount, WeightSlot
from llmc.program.launch_arguments import Count, Operand
from llmc.program.program_json import program_from_json, program_to_json

PROGRAM = Program(
    limits=Limits(512, 64, 64, 2048, 16),
    vocab_size=4096,
    arena=Affine(64, 128, 256),
    unplanned_arena=Affine(tokens=1024),
    buffers=(Buffer("x", "BF16", RowCount.TOKENS, 256, Affine(64), 0, 3),),
    weights=(WeightSlot("a.weight", "BF16", (256, 768), Layout.GATED_PANELS, 393216),),
    caches=(CacheSlot(2, 64, 64, "BF16"),),
    launches=(
        Launch(
            "llmc_linear_bf16",
            "linear",
            ("BF16",),
            {
                "x": Operand("buffer", "x", 8, 256),
                "k": Operand("cache", "0.k"),
                "tokens": Count.TOKENS,
                "max_blocks": Count.MAX_BLOCKS,
                "scale": 1.0,
                "activation": "silu",
                "interleaved": False,
                "bias": None,
                "cap": float("inf"),
            },
            Origin(("linear_1", "add"), "#12 fuse_linear", 'File "modèle.py", line 3\n  y = f(x)'),
            "2*T*256 + 393216",
            "2*T*256*768",
        ),
    ),
)
AT = Path("e.llmc/program.json")


def test_round_trip() -> None:
    text = program_to_json(PROGRAM)
    assert '"x": "buffer:x+8/256", "k": "cache:0.k", "tokens": "T", "max_blocks": "max_blocks"' in text
    assert program_from_json(text, AT) == PROGRAM
    assert program_to_json(program_from_json(text, AT)) == text


@pytest.mark.parametrize(
    ("change", "problem", "at"),
    [
        (lambda p: p.pop("caches"), "the field 'caches' is missing", "program"),
        (lambda p: p.update(extra=1), "unknown field 'extra'", "program"),
        (
            lambda p: p["weights"][0].update(layout="diagonal"),
            "expected one of rows, panels",
            "program.weights[0].layout",
        ),
        (lambda p: p["buffers"][0].update(rows="X"), "expected one of T, L, 1, found 'X'", "program.buffers[0].rows"),
        (lambda p: p["arena"].update(tokens=1.5), "expected a whole number, found 1.5", "program.arena.tokens"),
        (lambda p: p["launches"][0]["arguments"].update(x=[1]), r"found \[1\]", "program.launches[0].arguments.x"),
        (
            lambda p: p["launches"][0]["arguments"].update(x="buffer:x+"),
            r"'buffer:x\+' is not an operand",
            "program.launches[0].arguments.x",
        ),
        (lambda p: p["weights"][0].update(shape=256), "expected a list, found 256", "program.weights[0].shape"),
    ],
)
def test_what_is_no_program(change: Callable[[dict[str, Any]], object], problem: str, at: str) -> None:
    content = json.loads(program_to_json(PROGRAM))
    change(content)
    with pytest.raises(EngineFormatError, match=problem) as caught:
        program_from_json(json.dumps(content), AT)
    assert caught.value.at == f"{AT}: {at}"
    assert caught.value.fix


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "null"])
def test_what_is_no_object(text: str) -> None:
    with pytest.raises(EngineFormatError):
        program_from_json(text, AT)
