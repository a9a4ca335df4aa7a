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


@pytest.mark.parametrize(("function", "code", "sums"), [("fp8_matmul", "u8", "bf16"), ("int8_matmul", "i8", "i32")])
def test_products_of_codes_are_their_sums(function: str, code: str, sums: str) -> None:
    """Exact ones in int32; of fp8 in fp32, which y gets in its dtype."""
    tokens, channels, outputs = 20, 32, 48
    types = TYPES | {"x_ptr": f"*{code}", "weight_ptr": f"*{code}", "y_ptr": f"*{sums}"}
    dtype = {"u8": "U8", "i8": "I8", "bf16": "BF16", "i32": "I32"}
    arguments: dict[str, CallArgument] = {
        "x_ptr": Pointer(ARENA, "", Affine(64), dtype[code]),
        "x_row_stride": Number(channels, "i32"),
        "weight_ptr": Pointer("weight", "w", Affine(16), dtype[code]),
        "y_ptr": Pointer(ARENA, "", Affine(1024), dtype[sums]),
        "y_row_stride": Number(outputs, "i32"),
        "tokens": Count.TOKENS,
        "IN": Number(channels, "i32"),
        "OUT": Number(outputs, "i32"),
    }
    parameters = tuple(DeviceParameter(name, kind, False) for name, kind in types.items())
    kernel = DeviceKernel(f"{function}.0", LIBRARY, function, parameters, {}, 4, 1)
    call = PlannedCall(0, kernel, tuple(arguments[name] for name in types), ("1",), None, (), (), ())
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randint(-100, 100, (rows, channels), generator=generator) for rows in (tokens, outputs)]
    kind = torch.float8_e4m3fn if code == "u8" else torch.int8
    x, weight = (each.float().to(kind) if code == "u8" else each.to(kind) for each in numbers)
    arena, stored = torch.zeros(8192, dtype=torch.uint8), torch.zeros(2048, dtype=torch.uint8)
    arena[64 : 64 + tokens * channels] = x.view(torch.uint8).reshape(-1)
    stored[16 : 16 + outputs * channels] = weight.view(torch.uint8).reshape(-1)
    tensors = DeviceTensors({(ARENA, ""): (arena, 0), ("weight", "w"): (stored, 0)}, torch.zeros(64))
    shape = replace(SHAPE, tokens=tokens)
    wanted = (x.double() @ weight.double().t()).to(torch.bfloat16 if sums == "bf16" else torch.int32)
    named = call.named_arguments(lambda pointer: tensors.at(pointer, shape), shape.counts())
    for is_prepared in (True, False):
        arena[1024:] = 0xFF
        if is_prepared:
            library_call(call, tensors)(shape, {})
        else:
            library_products.FUNCTIONS[function](**named)
        nbytes = tokens * outputs * wanted.itemsize
        assert torch.equal(arena[1024 : 1024 + nbytes].view(wanted.dtype).view(tokens, outputs), wanted)
        assert (arena[1024 + nbytes :] == 0xFF).all()


def test_products_of_one_step_share_views() -> None:
    spaces, inputs = memory()
    tensors = DeviceTensors(spaces, inputs)
    views: Views = {}
    for call in (product(), product(), product(y_ptr=Pointer(ARENA, "", Affine(768), "BF16"))):
        library_call(call, tensors)(SHAPE, views)
    assert len(views) == 3
    library_call(product(), tensors)(replace(SHAPE, tokens=4), views)
    assert len(views) == 5
