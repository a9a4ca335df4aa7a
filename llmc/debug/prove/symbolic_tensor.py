"""A tensor whose elements are sympy expressions: torch runs on it, and so do the eager references of llmc's ops.

Elements are indices of expressions in a pool, held in an int64 tensor. Ops that only move data run on that tensor
unchanged, including views and writes through them. Pointwise ops come from graph/pointwise.py, element by element.
Sums, matrix products and softmax are implemented here.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map

from llmc.debug.prove.elementary import MEANINGS, Expression, exact
from llmc.graph.op_record import RECORDS
from llmc.graph.pointwise import ELEMENTARY, REDUCTIONS, Kind, emit

aten = torch.ops.aten


class NotOverSymbols(Exception):
    """An op has no meaning over symbols here."""


class Pool:
    """Expressions by number; equal ones have the same. Number 0 is the expression 0, so that zeros are zeros."""

    def __init__(self) -> None:
        self.expressions: list[Expression] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._numbers: dict[Expression, int] = {}
        self.number(sympy.S.Zero)

    def number(self, expression: Expression) -> int:
        """The index of an expression, added if it is new."""
        index = self._numbers.setdefault(expression, len(self.expressions))
        if index == len(self.expressions):
            self.expressions.append(expression)
        return index

    def symbols(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> "SymbolicTensor":
        """A tensor of symbols name[i, j]."""
        places = itertools.product(*(range(size) for size in shape))
        numbers = [self.number(sympy.Symbol(f"{name}{list(place)}", real=True)) for place in places]
        return SymbolicTensor(torch.tensor(numbers, dtype=torch.int64).reshape(tuple(shape)), self, dtype)

    def numbers_of(self, value: Any) -> Tensor:
        """The indices of a tensor's elements, or of a number."""
        if isinstance(value, SymbolicTensor):
            return value.numbers
        elements = value.reshape(-1).tolist() if isinstance(value, Tensor) else [value]
        shape = value.shape if isinstance(value, Tensor) else ()
        return torch.tensor([self.number(exact(element)) for element in elements], dtype=torch.int64).reshape(shape)

    def elements(self, value: Any) -> list[Expression]:
        """A tensor's elements in order."""
        return [self.expressions[i] for i in self.numbers_of(value).reshape(-1).tolist()]


class SymbolicTensor(Tensor):
    """A tensor whose elements are expressions. numbers: the numbers of the elements in the pool, an int64 tensor of the
    same shape. dtype: what torch sees; elements are real."""

    numbers: Tensor
    pool: Pool

    @staticmethod
    def __new__(cls: "type[SymbolicTensor]", numbers: Tensor, pool: Pool, dtype: torch.dtype) -> "SymbolicTensor":
        make: Any = Tensor._make_wrapper_subclass
        instance: SymbolicTensor = make(cls, numbers.shape, numbers.stride(), dtype=dtype)
        instance.numbers, instance.pool = numbers, pool
        return instance

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called by torch in place of a kernel."""
        keywords = kwargs or {}
        pool = next(v.pool for v in tree_flatten((args, keywords))[0] if isinstance(v, SymbolicTensor))
        if func in RECORDS:
            return RECORDS[func].reference(*args, **keywords)
        if func in _STRUCTURED:
            return _STRUCTURED[func](*args, **keywords)
        if func in _EMPTY:
            like = _example(func, args, keywords)
            return SymbolicTensor(torch.zeros(like.shape, dtype=torch.int64), pool, like.dtype)
        if func in ELEMENTARY and func not in REDUCTIONS:
            return _pointwise(pool, func, args, keywords)
        if func._schema.is_mutable and func not in _MOVES:
            return _in_place(func, args, keywords)
        if func not in _MOVES:
            decomposed = func.decompose(*args, **keywords)
            if decomposed is not NotImplemented:
                return decomposed
            if not func.is_view:
                raise NotOverSymbols(f"{func} has no meaning over symbols")
        return _moved(pool, func, args, keywords)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SymbolicTensor({self.pool.elements(self)})"


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the out-of-place op of the same name and store its result in the first argument."""
    packet = getattr(aten, func._schema.name.removeprefix("aten::").removesuffix("_"), None)
    if packet is None or not func._schema.name.endswith("_"):
        raise NotOverSymbols(f"{func} has no meaning over symbols")
    args[0].numbers.copy_(getattr(packet, func._overloadname)(*args, **kwargs).numbers)
    return args[0]


def _moved(pool: Pool, func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, Tensor) and v.dtype.is_floating_point]
    dtype = tensors[0].dtype

    def numbers(value: Any) -> Any:
        is_data = isinstance(value, SymbolicTensor) or (isinstance(value, Tensor) and value.dtype.is_floating_point)
        return pool.numbers_of(value) if is_data else value

    out = func(*tree_map(numbers, args), **tree_map(numbers, kwargs))
    if func._schema.is_mutable:
        return args[0]
    return tree_map(lambda n: SymbolicTensor(n, pool, dtype) if isinstance(n, Tensor) else n, out)


def _example(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on ones, to get the shape and dtype of its result."""
    plain = tree_map(lambda v: torch.ones(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v, (args, kwargs))
    return func(*plain[0], **plain[1])


def _pointwise(pool: Pool, func: Any, args: Any, kwargs: Any) -> SymbolicTensor:
    """Element by element, as the vocabulary writes it in elementary functions."""
    like, graph = _example(func, args, kwargs), fx.Graph()
    operands: dict[fx.Node, list[int]] = {}

    def operand(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"operand_{len(operands)}")
        node.meta["val"] = torch.empty(value.shape, dtype=value.dtype)
        operands[node] = pool.numbers_of(value).expand(like.shape).reshape(-1).tolist()
        return node

    node = graph.call_function(func, tree_map(operand, args), tree_map(operand, kwargs))
    node.meta["val"] = like
    emitted: dict[tuple[int, ...], int] = {}
    numbers = []
    for place in range(like.numel()):
        key = tuple(value[place] for value in operands.values())
        if key not in emitted:
            emitted[key] = emit(node, _Element(pool, dict(zip(operands, key, strict=True))))
        numbers.append(emitted[key])
    return SymbolicTensor(torch.tensor(numbers, dtype=torch.int64).reshape(like.shape), pool, like.dtype)


class _Element:
    """One element of a pointwise op's result (graph/pointwise.py's Statements)."""

    def __init__(self, pool: Pool, operands: dict[fx.Node, int]) -> None:
        self._pool, self._operands = pool, operands

    def read(self, argument: Any, kind: Kind) -> int:
        """The operand's element, or a number."""
        if not isinstance(argument, fx.Node):
            return self.number(argument, kind)
        number, seen = self._operands[argument], _kind(argument.meta["val"].dtype)
        return number if seen is kind else self.apply(f"to_{kind.value}", number, kind=kind)

    def number(self, value: float | int | bool, kind: Kind) -> int:
        return self._pool.number(exact(bool(value) if kind is Kind.BOOL else value))

    def apply(self, function: str, *operands: int, kind: Kind = Kind.FLOAT) -> int:
        """Apply an elementary function to expressions."""
        return self._pool.number(MEANINGS[function](*(self._pool.expressions[o] for o in operands)))

    def reduce(self, reduction: str, operand: int) -> int:
        """Raise: no op that is evaluated element by element reduces."""
        raise NotOverSymbols(f"{reduction} over a row")


def _kind(dtype: torch.dtype) -> Kind:
    if dtype == torch.bool:
        return Kind.BOOL
    return Kind.FLOAT if dtype.is_floating_point else Kind.INT


def _rows(x: SymbolicTensor, dims: int | Sequence[int] | None) -> tuple[list[int], list[list[Expression]]]:
    """The axes that are reduced, and for each element of the rest what lies along them."""
    rank = x.dim()
    axes = [dims] if isinstance(dims, int) else list(dims or range(rank))
    axes = [a % rank for a in axes]
    last = x.numbers.movedim(axes, list(range(rank - len(axes), rank)))
    size = math.prod(x.shape[a] for a in axes)
    return axes, [[x.pool.expressions[i] for i in row] for row in last.reshape(-1, size).tolist()]


def _reduced(combine: Callable[[list[Expression]], Expression]) -> Callable[..., SymbolicTensor]:
    def reduce(
        x: SymbolicTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> SymbolicTensor:
        axes, rows = _rows(x, dim)
        shape = [1 if i in axes else s for i, s in enumerate(x.shape)]
        numbers = torch.tensor([x.pool.number(combine(row)) for row in rows], dtype=torch.int64).reshape(shape)
        kept = shape if keepdim else [s for i, s in enumerate(shape) if i not in axes]
        return SymbolicTensor(numbers.reshape(kept), x.pool, dtype or x.dtype)

    return reduce


def _mean(row: list[Expression]) -> Expression:
    return sympy.Add(*row) / len(row)


def _variance(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    axes, rows = _rows(x, dim)
    centred = x - aten.mean.dim(x, axes, True)
    total = aten.sum.dim_IntList(centred * centred, axes, keepdim)
    return total / (len(rows[0]) - (1 if correction is None else correction))


def _variance_and_mean(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return _variance(x, dim, correction=correction, keepdim=keepdim), aten.mean.dim(x, dim, keepdim)


def _deviation(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return torch.sqrt(_variance(x, dim, correction=correction, keepdim=keepdim))


def _log_of_sum(x: Any, dim: Any, keepdim: bool = False) -> Any:
    return torch.log(aten.sum.dim_IntList(torch.exp(x), dim, keepdim))


def _between(x: Any, least: Any = None, most: Any = None) -> Any:
    x = x if least is None else torch.maximum(x, least)
    return x if most is None else torch.minimum(x, most)


def _norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False) -> Any:
    powers = aten.sum.dim_IntList(torch.abs(x) ** ord, dim, keepdim)
    return powers if ord == 1 else powers ** (1 / ord)


def _written(x: Any, dim: int, index: Tensor, value: float) -> SymbolicTensor:
    return SymbolicTensor(x.numbers.scatter(dim, index, x.pool.number(exact(value))), x.pool, x.dtype)


def _softmax(x: Any, dim: int, _: Any = None) -> Any:
    # Over the reals there is nothing to overflow.
    powers = torch.exp(x)
    return powers / aten.sum.dim_IntList(powers, [dim], True)


def _copy(into: Any, source: Any, non_blocking: bool = False) -> Any:
    return aten._to_copy.default(source, dtype=into.dtype).expand(into.shape)


def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    axes = list(range(x.dim() - len(shape), x.dim()))
    variance, mean = _variance_and_mean(x, axes, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    y = (x - mean) * scale
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, scale


def _product(x: Any, y: Any) -> SymbolicTensor:
    """The product of matrices, or of batches of matrices."""
    pool = next(v.pool for v in (x, y) if isinstance(v, SymbolicTensor))
    left, right = ([pool.numbers_of(v).tolist()] if v.dim() == 2 else pool.numbers_of(v).tolist() for v in (x, y))
    element = pool.expressions
    numbers = [
        [
            [
                pool.number(sympy.Add(*(element[a] * element[b] for a, b in zip(row, column, strict=True))))
                for column in columns
            ]
            for row in rows
        ]
        for rows, columns in ((m, list(zip(*n, strict=True))) for m, n in zip(left, right, strict=True))
    ]
    shape = (*x.shape[:-1], y.shape[-1])
    return SymbolicTensor(torch.tensor(numbers, dtype=torch.int64).reshape(shape), pool, x.dtype)


def _product_and_sum(bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return beta * bias + alpha * _product(x, y)


_STRUCTURED: dict[Any, Callable[..., Any]] = {
    aten.mean.dim: _reduced(_mean),
    aten.mean.default: _reduced(_mean),
    aten.sum.dim_IntList: _reduced(lambda row: sympy.Add(*row)),
    aten.sum.default: _reduced(lambda row: sympy.Add(*row)),
    aten.amax.default: _reduced(lambda row: sympy.Max(*row)),
    aten.amin.default: _reduced(lambda row: sympy.Min(*row)),
    aten.clamp.Tensor: _between,
    aten.linalg_vector_norm.default: _norm,
    aten.log_sigmoid_forward.default: lambda x: (torch.log(torch.sigmoid(x)), x),
    aten.logsumexp.default: _log_of_sum,
    aten.scatter.value: _written,
    aten.std.correction: _deviation,
    aten.var.correction: _variance,
    aten.var_mean.correction: _variance_and_mean,
    aten._safe_softmax.default: _softmax,
    aten._softmax.default: _softmax,
    aten.native_layer_norm.default: _layer_norm,
    aten.copy.default: _copy,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _product_and_sum,
    aten.baddbmm.default: _product_and_sum,
}
_MOVES = frozenset(
    {
        aten._reshape_alias.default,
        aten._unsafe_view.default,
        aten.cat.default,
        aten.clone.default,
        aten.copy_.default,
        aten.embedding.default,
        aten.flip.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.index_put_.default,
        aten.index_select.default,
        aten.repeat.default,
        aten.repeat_interleave.self_int,
        aten.select_scatter.default,
        aten.slice_scatter.default,
        aten.stack.default,
        aten.tril.default,
        aten.triu.default,
    }
)
_EMPTY = frozenset({aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default, aten.zeros_like.default})
