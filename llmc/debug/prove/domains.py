"""The domain of a pattern's wildcard, by the op argument that it replaces: a few values, the likeliest first."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from llmc.graph.op_record import record_of
from llmc.ops.pool import POOLINGS

# Small, unequal where they can be.
SHAPES = ((2, 4), (4,), (3, 4), (2,), (3,), (2, 3), (2, 2, 4), (2, 2), (4, 4), ())
# Numbers that are not special.
NUMBERS = (0.625, 2)
INTEGERS = (0, 1, 2, 4, -1)
_BY_TYPE: dict[str, tuple[Any, ...]] = {
    "float": NUMBERS,
    "number": NUMBERS,
    "int": INTEGERS,
    "bool": (False, True),
    "ScalarType": (torch.float32, torch.bfloat16),
    "List[int]": ([4], [-1], [2], [2, 2], [2, 4], [0, 1]),
}
_STRINGS: dict[str, tuple[str, ...]] = {
    "activation": ("silu", "relu", "gelu_tanh", "identity"),
    "approximate": ("none", "tanh"),
    "pooling": POOLINGS,
}


def domain(call: fx.Node, argument: str, may_be_number: bool = True) -> Sequence[Any]:
    """The domain of an argument of an op call: shapes for a tensor, with None last if it is optional.

    may_be_number: whether a number may stand where aten takes a tensor.
    """
    schema: Any = getattr(call.target, "_schema")  # noqa: B009
    wanted = str(next(a.real_type for a in schema.arguments if a.name == argument))
    required = wanted.removeprefix("Optional[").removesuffix("]") if wanted.startswith("Optional[") else wanted
    absent = () if required is wanted else (None,)
    if "Tensor" not in required:
        values = _STRINGS.get(argument, ()) if required == "str" else _BY_TYPE.get(required, ())
        return (*values, *absent)
    record = record_of(call)
    # aten takes a number in the place of an operand, but of the first.
    is_operand = record is None and argument != schema.arguments[0].name
    return (*_shapes(call, argument), *(NUMBERS if may_be_number and is_operand else ()), *absent)


def _shapes(call: fx.Node, argument: str) -> Sequence[tuple[int, ...]]:
    """Shapes with the axes that the op's record names, and optional leading axes."""
    record = record_of(call)
    named = () if record is None or record.axes is None else record.axes.arguments.get(argument, ())
    return [shape for shape in SHAPES if len(shape) >= len(named)]
