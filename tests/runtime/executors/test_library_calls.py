"""Prepared products give what the library's function gives, and share the views of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llmc.program import Affine, DeviceKernel, DeviceParameter, library_products
from llmc.program.device_kernel import LIBRARY
from llmc.program.launch_arguments import Count, Rows
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.program import ARENA, CallArgument, Number, PlannedCall, Pointer
from llmc.runtime.executors.library_calls import DeviceTensors, Views, library_call

SHAPE = StepShape(tokens=5, logit_rows=3, requests=2, max_blocks=4)
IN, OUT = 8, 6
TYPES = {"x_ptr": "*bf16", "x_row_stride": "i32", "weight_ptr": "*bf16", "y_ptr": "*bf16", "y_row_stride": "i32"}
TYPES |= {"tokens": "i32", "IN": "i32", "OUT": "i32"}


def product(**changes: CallArgument) -> PlannedCall:
    """y of 6 channels from x of 8, in rows of 10 elements."""
    arguments: dict[str, CallArgument] = {
        "x_ptr": Pointer(ARENA, "", Affine(32, 0, 16), "BF16"),
        "x_row_stride": Number(10, "i32"),
        "weight_ptr": Pointer("weight", "w", Affine(16), "BF16"),
        "y_ptr": Pointer(ARENA, "", Affine(512, 64), "BF16"),
        "y_row_stride": Number(OUT, "i32"),
        "tokens": Count.TOKENS,
        "IN": Number(IN, "i32"),
        "OUT": Number(OUT, "i32"),
    }
    arguments |= changes
    parameters = tuple(DeviceParameter(name, kind, False) for name, kind in TYPES.items())
    kernel = DeviceKernel("matmul.0", LIBRARY, "matmul", parameters, {}, 4, 1)
    return PlannedCall(0, kernel, tuple(arguments[name] for name in TYPES), ("1",), None, (), (), ())


def memory() -> tuple[dict[tuple[str, str], tuple[Tensor, int]], Tensor]:
    """The arena, weights that start at byte 64 of theirs, and the inputs."""
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> Tensor:
        return torch.randn(count, generator=generator).bfloat16().view(torch.uint8)

    return {(ARENA, ""): (random(1001), 0), ("weight", "w"): (random(200), 64)}, random(4000)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokens": Number(2, "i32")},
        {"tokens": Rows(2, Count.LOGIT_ROWS)},
        {"x_ptr": Pointer("input", "positions", Affine(2), "BF16")},
        {"weight_ptr": Pointer(ARENA, "", Affine(16, 16), "BF16")},
        {"IN": Count.MAX_BLOCKS},
    ],
)
def test_products_are_those_of_the_function(changes: dict[str, CallArgument]) -> None:
    call = product(**changes)
    spaces, inputs = memory()
    tensors = DeviceTensors(spaces, inputs)
    arena = spaces[ARENA, ""][0]
    before = arena.clone()
    library_products.matmul(**call.named_arguments(lambda pointer: tensors.at(pointer, SHAPE), SHAPE.counts()))
    wanted = arena.clone()
    assert not torch.equal(wanted, before)
    arena.copy_(before)
    library_call(call, tensors)(SHAPE, {})
    assert torch.equal(arena, wanted)


def test_products_of_one_step_share_views() -> None:
    spaces, inputs = memory()
    tensors = DeviceTensors(spaces, inputs)
    views: Views = {}
    for call in (product(), product(), product(y_ptr=Pointer(ARENA, "", Affine(768), "BF16"))):
        library_call(call, tensors)(SHAPE, views)
    assert len(views) == 3
    library_call(product(), tensors)(replace(SHAPE, tokens=4), views)
    assert len(views) == 5
