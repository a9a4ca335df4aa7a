"""aten's ops that move elements and make no new ones: shapes, joins, cuts and lookups."""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from llmc.codegen.onnx.function_body import END, Body, NotInOnnx, Operand, Value, standard

aten = torch.ops.aten
Sizes = Sequence[int | Value]


def reshape(b: Body, self: Value, shape: Sizes = (), size: Sizes = ()) -> str:
    """Reshape. size: what view calls the shape."""
    return b("Reshape", self, b.sizes(shape or size))


def flatten(b: Body, self: Value, start_dim: int, end_dim: int) -> str:
    """Reshape, with the sizes before and after as they are."""
    rank = len(self.shape)
    start, end = start_dim % rank, end_dim % rank
    leading, trailing = b("Shape", self, end=start), b("Shape", self, start=end + 1)
    return b("Reshape", self, b("Concat", leading, b.integers([-1]), trailing, axis=0))


def expand(b: Body, self: Value, size: Sizes) -> str:
    """Expand; -1, a size as it is, is 1 there."""
    return b("Expand", self, b.sizes([1 if isinstance(s, int) and s == -1 else s for s in size]))


def permute(b: Body, self: Value, dims: Sequence[int]) -> str:
    """Transpose."""
    return b.transpose(self, *(dim % len(self.shape) for dim in dims))


def transpose(b: Body, self: Value, dim0: int, dim1: int) -> str:
    """Transpose of two axes."""
    axes = list(range(len(self.shape)))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return b.transpose(self, *axes)


def matrix_transpose(b: Body, self: Value) -> str:
    """Transpose of a matrix."""
    return b.transpose(self, *reversed(range(len(self.shape))))


def unsqueeze(b: Body, self: Value, dim: int) -> str:
    """Unsqueeze."""
    return b.unsqueeze(self, dim)


def squeeze(b: Body, self: Value, dim: int) -> str:
    """Squeeze of an axis that has one element."""
    return b.squeeze(self, dim) if isinstance(self.shape[dim], int) and self.shape[dim] == 1 else b("Identity", self)


def select(b: Body, self: Value, dim: int, index: int | Value) -> str:
    """Select one element of an axis."""
    return b("Gather", self, b.integer(index) if isinstance(index, int) else index, axis=dim)


def slice_(b: Body, self: Value, dim: int, start: Any, end: Any, step: int) -> str:
    """Slice."""
    bounds = [0 if start is None else start, END if end is None else end]
    return b("Slice", self, *(b.sizes([bound]) for bound in bounds), b.integers([dim]), b.integers([step]))


def cat(b: Body, tensors: Sequence[Value], dim: int) -> str:
    """Concat."""
    return b("Concat", *tensors, axis=dim)


def stack(b: Body, tensors: Sequence[Value], dim: int) -> str:
    """Concat along a new axis."""
    axis = dim % (len(tensors[0].shape) + 1)
    return b("Concat", *(b.unsqueeze(tensor, axis) for tensor in tensors), axis=axis)


def split_with_sizes(b: Body, self: Value, split_sizes: Sizes, dim: int) -> tuple[str, ...]:
    """Split."""
    return b.several("Split", len(split_sizes), self, b.sizes(split_sizes), axis=dim)


def split(b: Body, self: Value, result: Sequence[Value], dim: int) -> tuple[str, ...]:
    """Split, in the sizes that the results have."""
    return b.several("Split", len(result), self, b.integers([part.size(dim) for part in result]), axis=dim)


def unbind(b: Body, self: Value, result: Sequence[Value], dim: int) -> tuple[str, ...]:
    """Split, without the axis."""
    parts = b.several("Split", len(result), self, axis=dim, num_outputs=len(result))
    return tuple(b.squeeze(part, dim) for part in parts)


def repeat_interleave(b: Body, self: Value, repeats: int, dim: int) -> str:
    """Repeat each element `repeats` times."""
    rank = len(self.shape)
    axis = dim % rank
    times = [1] * (axis + 1) + [repeats] + [1] * (rank - axis - 1)
    wide = b("Expand", b.unsqueeze(self, axis + 1), b.integers(times))
    sizes = b("Concat", b("Shape", self, end=axis), b.integers([-1]), b("Shape", self, start=axis + 1), axis=0)
    return b("Reshape", wide, sizes)


def index_select(b: Body, self: Value, dim: int, index: Value) -> str:
    """Gather."""
    return b("Gather", self, index, axis=dim)


def gather(b: Body, self: Value, dim: int, index: Value) -> str:
    """GatherElements."""
    return b("GatherElements", self, b.cast(index, torch.int64), axis=dim)


def index(b: Body, self: Value, indices: Sequence[Value | None]) -> str:
    """Gather along the one axis that has an index; GatherND where the first axes have one each, or a mask."""
    indexed = [(axis, entry) for axis, entry in enumerate(indices) if entry is not None]
    if len(indexed) == 1 and indexed[0][1].dtype is not torch.bool:
        return b("Gather", self, indexed[0][1], axis=indexed[0][0])
    if [axis for axis, _ in indexed] != list(range(len(indexed))) or any(
        entry.dtype is torch.bool for _, entry in indexed
    ):
        raise NotInOnnx("the axes that are looked up are not the first ones")
    shape: Operand = b("Shape", indexed[0][1])
    for _, tensor in indexed[1:]:
        shape = b("Shape", b("Expand", tensor, shape))
    columns = [b.unsqueeze(b("Expand", b.cast(entry, torch.int64), shape), -1) for _, entry in indexed]
    return b("GatherND", self, b("Concat", *columns, axis=-1))


def diff(b: Body, self: Value, dim: int, prepend: Value | None, append: Value | None) -> str:
    """Subtract from each element the one before."""
    whole: Operand = self
    if prepend is not None or append is not None:
        whole = b("Concat", *(part for part in (prepend, self, append) if part is not None), axis=dim)
    axis = dim % len(self.shape)
    return b("Sub", b.slice(whole, axis, 1, END), b.slice(whole, axis, 0, -1))


def sym_size(b: Body, self: Value, dim: int) -> str:
    """A size, as a scalar."""
    return b.squeeze(b.length(self, dim % len(self.shape)), 0)


def arithmetic(op: str) -> Any:
    """The function of Python's arithmetic on sizes."""

    def build(b: Body, operand_0: int | Value, operand_1: int | Value) -> str:
        return b(
            op, *(b.integer(operand) if isinstance(operand, int) else operand for operand in (operand_0, operand_1))
        )

    return build


# They return the tensor itself, because memory layout does not matter here.
_ALIASES = ("alias", "clone", "contiguous", "detach", "lift_fresh_copy")

FUNCTIONS: dict[Any, Any] = {
    **{getattr(aten, name).default: standard("Identity") for name in _ALIASES},
    **dict.fromkeys((aten.reshape.default, aten.view.default, aten._unsafe_view.default), reshape),
    aten.flatten.using_ints: flatten,
    aten.expand.default: expand,
    aten.permute.default: permute,
    aten.transpose.int: transpose,
    aten.t.default: matrix_transpose,
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.dim: squeeze,
    aten.select.int: select,
    aten.slice.Tensor: slice_,
    aten.cat.default: cat,
    aten.concat.default: cat,
    aten.stack.default: stack,
    aten.split_with_sizes.default: split_with_sizes,
    aten.split.Tensor: split,
    aten.chunk.default: split,
    aten.unbind.int: unbind,
    aten.repeat_interleave.self_int: repeat_interleave,
    aten.embedding.default: standard("Gather", axis=0),
    aten.index_select.default: index_select,
    aten.gather.default: gather,
    aten.index.Tensor: index,
    aten.diff.default: diff,
    aten.sym_size.int: sym_size,
    operator.add: arithmetic("Add"),
    operator.sub: arithmetic("Sub"),
    operator.mul: arithmetic("Mul"),
    operator.neg: standard("Neg"),
}
