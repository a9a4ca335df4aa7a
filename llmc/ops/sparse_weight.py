"""Sparse weights: the nonzero elements, with 64-bit masks of their places.

A weight [out, in] is stored as masks [out, ⌈in / 64⌉], int64, bit i of word w for column 64·w + i, and values [count]:
the elements whose bit is set, in row order. The stored size is
`bits · (1 - zeros) + 1` bits per weight. There may be more values than bits, for example if ranks have different
counts; the excess is not read. Symmetric int8 codes are stored in the same way, with separate scales.

An element is zero if all its bits are: -0.0 is stored.
"""

import torch
from torch import Tensor

from llmc.graph.code_numbers import weight_values
from llmc.graph.op_record import OpCall, Part
from llmc.ops.registry import FROM_CAPTURED, IN_NO_GRAPH, like, op, per_element

MASK_BITS = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _fits(call: OpCall) -> str | None:
    """A word of mask for each 64 columns."""
    masks, columns = call.shape("masks"), call.arguments["columns"]
    if len(masks) == 2 and masks[1] == -(-columns // MASK_BITS):
        return None
    return f"masks {masks} are not words of {MASK_BITS} bits for {columns} columns"


@op(
    fake=lambda a: a.values.new_empty((a.masks.shape[0], a.columns), dtype=a.dtype),
    stages=FROM_CAPTURED,
    flops=per_element(0),
    rows=("values", "masks"),
    check=_fits,
    part=Part.STORAGE,
)
def sparse_bitmask(values: Tensor, masks: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight [out, columns] of values [count] with masks [out, ⌈columns / 64⌉], in dtype."""
    return expanded(values, masks, columns).to(dtype)


@op(
    fake=lambda a: a.values.new_empty((a.masks.shape[0], a.columns), dtype=a.dtype),
    stages=FROM_CAPTURED,
    flops=per_element(0),
    rows=("values", "masks", "scales"),
    check=_fits,
    part=Part.STORAGE,
)
def sparse_codes(
    values: Tensor, masks: Tensor, scales: Tensor, columns: int, format: str, dtype: torch.dtype
) -> Tensor:
    """The weight [out, columns] that symmetric codes stand for (weight_codes.py), in dtype. values: [count], the codes
    that are not zero; scales: [out, groups]."""
    return weight_values(expanded(values, masks, columns), scales, None, format).to(dtype)


def expanded(values: Tensor, masks: Tensor, columns: int) -> Tensor:
    """The elements [out, columns] that masks say, with zeros between them."""
    kept = mask_bits(masks, columns)
    return values.new_zeros(kept.shape).masked_scatter(kept, values)


def mask_bits(masks: Tensor, columns: int) -> Tensor:
    """[out, columns], bool: which bits of masks [out, words] are set."""
    of_bytes = masks.contiguous().view(torch.uint8)[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    bits: Tensor = (of_bytes & 1).flatten(1)[:, :columns]
    return bits.bool()


def mask_words(kept: Tensor) -> Tensor:
    """Masks [out, ⌈in / 64⌉] of the kept elements [out, in]."""
    padded = torch.nn.functional.pad(kept.to(torch.uint8), (0, -kept.shape[1] % MASK_BITS))
    bits = padded.unflatten(1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)
    words: Tensor = bits.sum(-1, dtype=torch.uint8).view(torch.int64)
    return words


def is_stored(weight: Tensor) -> Tensor:
    """Return which elements have their bit set, bool."""
    return weight.contiguous().view(_INTEGERS[weight.dtype.itemsize]) != 0


@op(
    fake=lambda a: a.weight.new_empty((a.weight.shape[0], -(-a.weight.shape[1] // MASK_BITS)), dtype=torch.int64),
    stages=IN_NO_GRAPH,
    flops=per_element(1),
)
def sparse_masks(weight: Tensor) -> Tensor:
    """The masks of a dense weight [out, in], or of codes: as a recipe, made while weights stream into an engine."""
    return mask_words(is_stored(weight))


@op(fake=lambda a: a.weight.new_empty(a.count), stages=IN_NO_GRAPH, flops=per_element(1))
def sparse_values(weight: Tensor, count: int) -> Tensor:
    """The elements of a dense weight [out, in] that are not zero, in order, filled up to `count` with zeros.

    Raises ValueError if there are more.
    """
    elements = weight[is_stored(weight)]
    if len(elements) > count:
        raise ValueError(f"{len(elements)} elements are not zero, but {count} were counted")
    return torch.nn.functional.pad(elements, (0, count - len(elements)))


@op(fake=like("weight"), stages=IN_NO_GRAPH, flops=per_element(1))
def pruned(weight: Tensor, masks: Tensor) -> Tensor:
    """A weight [out, in] with zeros where masks [out, ⌈in / 64⌉] have no bit: a recipe that keeps the checkpoint's
    tensor and one bit for each element."""
    return torch.where(mask_bits(masks, weight.shape[1]), weight, torch.zeros((), dtype=weight.dtype))
