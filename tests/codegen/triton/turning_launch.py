"""The decode of attention that rotates and writes its own tokens' rows, as turning_decode.py makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.program.launch_arguments import Operand
from tests.codegen.triton.tensor_call import TensorCall


def turning_launch(
    call: TensorCall, decode: DeviceLaunch, given: Mapping[str, Tensor], half: int, interleaved: bool
) -> DeviceLaunch:
    """`decode` of a call of paged attention, on what its rotation would read: rows of k and v, cos, sin and
    slot_mapping. It may write the caches."""
    own = {f"{name}_ptr": call.give(Operand("buffer", name), tensor) for name, tensor in given.items()}
    strides = {f"{name}_row_stride": given[name].shape[1] for name in ("k", "v")}
    constants = {**decode.constants, "HALF": half, "INTERLEAVED": interleaved}
    return replace(decode, arguments={**decode.arguments, **own, **strides}, constants=constants)
