"""Which ops have a function of standard ops, and why some have none.

An op that is in neither table is refused by its name where it is to be written: an op takes no line here.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from llmc.codegen.onnx.functions import aten_rows, aten_shapes, attention, choices, codes, products, rows, states

llmc = torch.ops.llmc

# A function's first argument is the body that it fills; the others are the op's relevant arguments by name: tensors as
# Value, numbers unchanged; `result` is the op's result. Arguments that only some of a function's ops have are
# parameters with defaults, or in `**`. It returns the names of its results and, after them, of each argument that the
# op writes.
Function = Callable[..., str | tuple[str, ...]]

FUNCTIONS: Mapping[Any, Function] = MappingProxyType(
    {
        **rows.FUNCTIONS,
        **products.FUNCTIONS,
        **attention.FUNCTIONS,
        **codes.FUNCTIONS,
        **choices.FUNCTIONS,
        **states.FUNCTIONS,
        **aten_shapes.FUNCTIONS,
        **aten_rows.FUNCTIONS,
    }
)
_RANKS = "ranks talk to each other in it, and a session is alone"
WITHOUT_FUNCTION: Mapping[Any, str] = MappingProxyType(
    {
        llmc.lora.default: "adapters at run time are supported on CPUs only: export the model with one merged into it",
        **dict.fromkeys(
            (llmc.choose_keys.default, llmc.paged_choose_keys.default),
            "keys are chosen on CPUs only: sequences up to the number of chosen keys (--max-model-len) need no choice",
        ),
        llmc.all_reduce.default: _RANKS,
        llmc.all_gather.default: _RANKS,
        **dict.fromkeys(
            (
                llmc.pool.default,
                llmc.pool_rows.default,
                llmc.bidirectional_attention.default,
                llmc.ragged_attention.default,
                llmc.segments.default,
                llmc.segments_of_texts.default,
            ),
            "models that read whole texts run on CPUs only",
        ),
    }
)
# Ops of captured graphs that only check and compute nothing.
NOTHING = frozenset({torch.ops.aten._assert_tensor_metadata.default})
