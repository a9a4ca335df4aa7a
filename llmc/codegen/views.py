"""The place of each node's value: views become strides into the tensor that they show, and nothing is copied.

The row axis (tokens T or logit rows L) of a computed tensor is its outermost axis in memory, wherever the graph has
it; the other axes are contiguous in order. Torch itself works out what a view op does: it runs on meta tensors in
which a large prime stands for T and another one for L, so every view op of torch is supported.
"""

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from llmc.codegen.origin import unsupported
from llmc.graph.model_graph import ModelGraph
from llmc.program import RowCount

Dim = int | RowCount
_PRIMES = {RowCount.TOKENS: 1_000_003, RowCount.LOGIT_ROWS: 999_983}
_ROW_COUNTS = {prime: rows for rows, prime in _PRIMES.items()}

_aten = torch.ops.aten
# A graph is functional, so a copy that only changes the layout may be read through.
_ALIASES = frozenset(
    {_aten.clone.default, _aten.contiguous.default, _aten.lift_fresh_copy.default, _aten.detach.default}
)
_CASTS = frozenset({_aten._to_copy.default, _aten.to.dtype})
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})

KEEP_TOKENS_APART = "keep tokens on their own axis: every operation but attention works on one token at a time"


@dataclass(frozen=True)
class Value:
    """A tensor that has its own memory: a placeholder, or output `index` of a computing node."""

    node: fx.Node
    index: int
    dtype: torch.dtype
    shape: tuple[Dim, ...]

    @property
    def rows(self) -> RowCount:
        """The unit that its row axis counts."""
        return row_count(self.shape)

    @property
    def columns(self) -> int:
        """The number of elements in a row."""
        return columns_of(self.shape)

    def whole(self) -> "View":
        """The view that sees all of it."""
        return View(self, 0, self.shape, _natural_strides(self.shape))


@dataclass(frozen=True)
class View:
    """Elements of `value`: from element `offset` of a row on, strides in elements, one an axis.

    The stride of the row axis is value.columns (or 0 where one row is broadcast to all).
    """

    value: Value
    offset: int
    shape: tuple[Dim, ...]
    strides: tuple[int, ...]

    @property
    def rows(self) -> RowCount:
        """The unit that its row axis counts."""
        return row_count(self.shape)

    @property
    def columns(self) -> int:
        """The number of elements in a row, counting those that it sees several times as often."""
        return columns_of(self.shape)

    def extent(self) -> tuple[int, int]:
        """First and one past the last element of a row that it can touch."""
        reach = sum((d - 1) * s for d, s in zip(self.shape, self.strides, strict=True) if isinstance(d, int))
        return self.offset, self.offset + reach + 1

    def overlaps(self, other: "View") -> bool:
        """Whether both may touch the same element."""
        if self.value != other.value:
            return False
        (a, b), (c, d) = self.extent(), other.extent()
        return a < d and c < b


Views = dict[fx.Node, View | tuple[View, ...]]


def row_count(shape: tuple[Dim, ...]) -> RowCount:
    """The unit that the row axis of a shape counts; ONE if it has none."""
    return next((d for d in shape if isinstance(d, RowCount)), RowCount.ONE)


def views_of(node: fx.Node, views: Views) -> tuple[View, ...]:
    """The views of a node's results, or of a claimed node's inputs; empty for a node without a value."""
    entry = views.get(node, ())
    return (entry,) if isinstance(entry, View) else entry


def view_of(node: fx.Node, views: Views) -> View:
    """The one view of a node with one result."""
    view = views[node]
    assert isinstance(view, View), f"{node.name} has several results"
    return view


def operand_views(node: fx.Node, views: Views) -> tuple[View, ...]:
    """The views that a node reads, one per tensor argument."""
    return tuple(view for source in node.all_input_nodes for view in views_of(source, views))


def columns_of(shape: tuple[Dim, ...]) -> int:
    """Return the number of elements in a row of a shape."""
    return math.prod(d for d in shape if isinstance(d, int))


def find_views(graph: ModelGraph, claimed: Collection[fx.Node] = ()) -> tuple[Views, frozenset[fx.Node]]:
    """Return every tensor node's view of a value, and the reshape nodes that need a copy of their input first.

    Such a reshape is a computing node: its value is the copy, in the shape of its input. A node with several outputs
    has a tuple of views. claimed: nodes without a value; their views are those of their inputs, in a tuple.
    Caches and tables are values too. Raises LoweringError for a shape that mixes tokens with another axis.
    """
    finder = _Finder(graph)
    for node in graph.graph.nodes:
        if node in claimed:
            finder.views[node] = operand_views(node, finder.views)
        else:
            finder.visit(node)
    return finder.views, frozenset(finder.copies)


class _Finder:
    """One walk over the graph: meta tensors of each node, and the value below each of them."""

    def __init__(self, graph: ModelGraph) -> None:
        self._symbols = _row_symbols(graph)
        self._tensors: dict[fx.Node, Any] = {}
        self._values: dict[fx.Node, Value | tuple[Value, ...]] = {}
        self.views: Views = {}
        self.copies: set[fx.Node] = set()

    def visit(self, node: fx.Node) -> None:
        if node.op == "output" or node.meta.get("val") is None:
            return
        fake = node.meta["val"]
        if isinstance(fake, torch.SymInt | int):
            self._tensors[node] = self._size(fake, node)
        elif node.op == "placeholder" or not self._is_view(node):
            self._compute(node, fake)
        else:
            self._look_through(node)

    def _is_view(self, node: fx.Node) -> bool:
        if node.target is operator.getitem or node.target in _ALIASES or node.target in _RESHAPES:
            return True
        source = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target in _CASTS:
            return isinstance(source, Tensor) and source.dtype == node.meta["val"].dtype
        return bool(getattr(node.target, "is_view", False))

    def _compute(self, node: fx.Node, fake: Any) -> None:
        if isinstance(fake, Tensor):
            value = Value(node, 0, fake.dtype, self._shape(fake, node))
            self._values[node], self.views[node], self._tensors[node] = value, value.whole(), _meta_tensor(value)
            return
        values = tuple(Value(node, i, t.dtype, self._shape(t, node)) for i, t in enumerate(fake))
        self._values[node] = values
        self.views[node] = tuple(v.whole() for v in values)
        self._tensors[node] = tuple(_meta_tensor(v) for v in values)

    def _look_through(self, node: fx.Node) -> None:
        source = node.all_input_nodes[0]
        below = self._values[source]
        if node.target is operator.getitem:
            index = node.args[1]
            assert isinstance(index, int)
            self._tensors[node] = self._tensors[source][index]
            self._values[node] = below[index] if isinstance(below, tuple) else below
        elif node.target in _ALIASES or node.target in _CASTS:
            self._tensors[node], self._values[node] = self._tensors[source], below
        else:
            assert isinstance(below, Value)
            self._tensors[node], self._values[node] = self._viewed(node, below)
        self.views[node] = self._view_of(node)

    def _viewed(self, node: fx.Node, below: Value) -> tuple[Any, Value]:
        assert callable(node.target)
        tensor = self._tensors[node.all_input_nodes[0]]
        if node.target not in _RESHAPES:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._tensors[n])
            return node.target(*args, **kwargs), below
        shape = [self._size(s, node) for s in node.meta["val"].shape]
        result = tensor.reshape(shape)
        if _same_memory(result, tensor):
            return result, below
        self.copies.add(node)
        value = Value(node, 0, below.dtype, self._dims(tensor.shape, node))
        return _meta_tensor(value).reshape(shape), value

    def _view_of(self, node: fx.Node) -> View | tuple[View, ...]:
        tensors, below = self._tensors[node], self._values[node]
        if isinstance(tensors, Tensor):
            assert isinstance(below, Value)
            return self._strided(node, tensors, below)
        values = below if isinstance(below, tuple) else (below,) * len(tensors)
        return tuple(self._strided(node, t, v) for t, v in zip(tensors, values, strict=True))

    def _strided(self, node: fx.Node, tensor: Tensor, value: Value) -> View:
        shape, offset = self._dims(tensor.shape, node), int(tensor.storage_offset())
        if offset >= max(value.columns, 1):
            raise unsupported(node, "it takes some of the tokens by their place in the step", KEEP_TOKENS_APART)
        return View(value, offset, shape, tuple(map(int, tensor.stride())))

    def _shape(self, fake: Tensor, node: fx.Node) -> tuple[Dim, ...]:
        if node.op == "placeholder" and not all(self._known(s) for s in fake.shape):
            return ()  # tables and caches of another symbol: only kernels see them
        return tuple(self._dims([self._size(s, node) for s in fake.shape], node))

    def _known(self, size: int | torch.SymInt) -> bool:
        return isinstance(size, int) or size.node.expr in self._symbols

    def _size(self, size: int | torch.SymInt, node: fx.Node) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr.xreplace({s: sympy.Integer(_PRIMES[rows]) for s, rows in self._symbols.items()})
        if not expression.is_number:
            raise unsupported(node, f"its shape has the unknown size {size}", KEEP_TOKENS_APART)
        return int(expression)

    def _dims(self, sizes: Any, node: fx.Node) -> tuple[Dim, ...]:
        dims = tuple(_ROW_COUNTS.get(int(s), int(s)) for s in sizes)
        if any(isinstance(d, int) and d >= min(_ROW_COUNTS) for d in dims) and node.op != "placeholder":
            raise unsupported(node, f"its shape {_shown(dims)} mixes tokens with another axis", KEEP_TOKENS_APART)
        if sum(isinstance(d, RowCount) for d in dims) > 1:
            raise unsupported(node, f"its shape {_shown(dims)} has two token axes", KEEP_TOKENS_APART)
        return dims


def _row_symbols(graph: ModelGraph) -> Mapping[Any, RowCount]:
    """The fake tensors' symbols for T and L, read off the step inputs."""
    symbols: dict[Any, RowCount] = {}
    axes = {
        "input_ids": (RowCount.TOKENS, -1),
        "positions": (RowCount.TOKENS, -1),
        "logit_rows": (RowCount.LOGIT_ROWS, 0),
    }
    for node in graph.inputs():
        if node.name in axes:
            rows, axis = axes[node.name]
            size = node.meta["val"].shape[axis]
            if not isinstance(size, torch.SymInt):
                fix = "capture it with a symbolic number of tokens: no control flow may depend on the length"
                raise unsupported(node, f"its length is fixed to {size}", fix)
            symbols[size.node.expr] = rows
    return symbols


def _natural_strides(shape: tuple[Dim, ...]) -> tuple[int, ...]:
    return tuple(columns_of(shape if isinstance(d, RowCount) else shape[axis + 1 :]) for axis, d in enumerate(shape))


def _meta_tensor(value: Value) -> Tensor:
    sizes = [_PRIMES[d] if isinstance(d, RowCount) else d for d in value.shape]
    return torch.empty_strided(sizes, _natural_strides(value.shape), dtype=value.dtype, device="meta")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    is_same: bool = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return is_same


def _shown(dims: tuple[Dim, ...]) -> str:
    names = (f"{d // p}·{_ROW_COUNTS[p].value}" for d in dims for p in _ROW_COUNTS if isinstance(d, int) and d % p == 0)
    merged = ", ".join(names)
    return f"[{', '.join(d.value if isinstance(d, RowCount) else str(d) for d in dims)}]" + (merged and f" ({merged})")
