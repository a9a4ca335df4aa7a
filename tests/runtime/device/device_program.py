"""Made-up GPU programs: one kernel, its launches, and a program around them."""

from __future__ import annotations

from llmc.program import (
    Affine,
    Buffer,
    CacheSlot,
    DeviceBinary,
    DeviceKernel,
    DeviceParameter,
    Launch,
    Layout,
    Limits,
    Origin,
    Program,
    RowCount,
    WeightSlot,
)
from llmc.program.launch_arguments import Argument, Count, Operand

LIMITS = Limits(max_batch_tokens=512, max_sequences=24, max_logit_rows=32, max_model_len=4096, block_size=16)


def binary(arch: str, *, extra_pointers: int = 0, scratch_bytes: int = 0) -> DeviceBinary:
    """A binary that no test loads."""
    return DeviceBinary(f"kernels/k.0.{arch}.cubin", "k", 128, 1, 0, 32, 0, extra_pointers, scratch_bytes, 128)


def kernel(*archs: str) -> DeviceKernel:
    """A kernel of pointers into every space, a count and numbers of each type."""
    types = {"x_ptr": "*bf16", "w_ptr": "*bf16", "k_ptr": "*bf16", "ids_ptr": "*i32", "y_ptr": "*fp32"}
    types |= {"n": "i32", "stride": "i32", "big": "i64", "scale": "fp32"}
    parameters = tuple(DeviceParameter(name, kind, False) for name, kind in types.items())
    return DeviceKernel("k.0", "kernels/k.py", "k", parameters, {"BLOCK": 8}, 4, 2, {a: binary(a) for a in archs})


def program(*archs: str) -> Program:
    """One launch of that kernel."""
    arguments: dict[str, Argument] = {
        "x_ptr": Operand("buffer", "x", 8, 64),
        "w_ptr": Operand("weight", "w"),
        "k_ptr": Operand("cache", "0.k"),
        "ids_ptr": Operand("input", "positions"),
        "y_ptr": Operand("output", "logits"),
        "n": Count.TOKENS,
        "stride": -3,
        "big": 2**40,
        "scale": 0.5,
    }
    launch = Launch("k.0", "k", (), arguments, Origin((), None, None), "0", "0", ("cdiv(T, 8)", "R"))
    return Program(
        limits=LIMITS,
        vocab_size=1000,
        arena=Affine(4096, 256, 8),
        unplanned_arena=Affine(),
        buffers=(Buffer("x", "BF16", RowCount.TOKENS, 64, Affine(64, 128, 16), 0, 0),),
        weights=(WeightSlot("w", "BF16", (1000, 64), Layout.ROWS, 128000),),
        caches=(CacheSlot(2, 64, 64, "BF16"),),
        launches=(launch,),
        kernels=(kernel(*archs),),
    )
