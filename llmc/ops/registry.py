"""How an llmc:: op is declared: a decorator on its eager reference that makes its record.

Registering with torch.library is the one side effect on import that this package has.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeVar

import sympy
import torch

from llmc.graph.axes import axis_rule
from llmc.graph.op_record import RECORDS, OpCall, OpRecord, Part, product
from llmc.graph.stage import Stage

F = TypeVar("F", bound=Callable[..., Any])
# Given the arguments by name, the empty tensors of the result's shape and dtype.
Fake = Callable[[Any], Any]
Flops = Callable[[OpCall], sympy.Expr]

FROM_CAPTURED = frozenset({Stage.CAPTURED, Stage.CANONICAL, Stage.SERVING, Stage.OPTIMIZED})
WHOLE_SEQUENCE = frozenset({Stage.CAPTURED, Stage.CANONICAL})
# Stages whose ops the later serving passes rewrite.
UNTIL_SERVING = WHOLE_SEQUENCE | {Stage.SERVING}
FROM_SERVING = frozenset({Stage.SERVING, Stage.OPTIMIZED})
WHEN_OPTIMIZED = frozenset({Stage.OPTIMIZED})
# Made by lowering, called by executors, or evaluated while weights are written: in no graph.
IN_NO_GRAPH: frozenset[Stage] = frozenset()

# Parts that may precede a lookup in a table, and a product.
LOOKUP: Mapping[str, Part] = MappingProxyType({"weight": Part.STORAGE})
PRODUCT: Mapping[str, Part] = MappingProxyType({"weight": Part.STORAGE, "x": Part.ARRIVAL})

_LIBRARY = torch.library.Library("llmc", "DEF")


def like(*names: str) -> Fake:
    """The fake of an op whose results have the shapes and dtypes of these arguments."""
    if len(names) == 1:
        return lambda a: torch.empty_like(getattr(a, names[0]))
    return lambda a: tuple(torch.empty_like(getattr(a, name)) for name in names)


def product_result(*, rows: int = 1, dtype: torch.dtype | None = None) -> Fake:
    """The fake of a product: x's rows, with a channel for each `rows` rows of weight: [out, in].

    dtype: the dtype of the result; None for that of the argument `dtype`, or else of x.
    """

    def fake(a: Any) -> torch.Tensor:
        shape = (*a.x.shape[:-1], a.weight.shape[0] // rows)
        result: torch.Tensor = a.x.new_empty(shape, dtype=dtype or a.dtype or a.x.dtype)
        return result

    return fake


def per_element(count: int) -> Flops:
    """Return a cost of `count` operations per element of the first result."""
    return lambda call: count * call.elements()


def matrix_product(call: OpCall) -> sympy.Expr:
    """The flops of multiplying each row of x by each row of weight."""
    return 2 * product(call.sizes("x")[:-1]) * product(call.sizes("weight"))


def op(
    *,
    fake: Fake,
    stages: Collection[Stage],
    flops: Flops,
    rows: tuple[str, ...] = (),
    table: str | None = None,
    share: Flops | None = None,
    writes: Collection[str] = (),
    check: Callable[[OpCall], str | None] | None = None,
    part: Part | None = None,
    takes: Mapping[str, Part] = MappingProxyType({}),
    axes: str | None = None,
    least_part: Callable[[OpCall], int] | None = None,
    across: Callable[..., Any] | None = None,
    linear_in: str | None = None,
    fallback: str | None = None,
) -> Callable[[F], F]:
    """Register the decorated eager reference as an llmc:: op of its name, with the schema of its signature.

    writes: the arguments that it changes in place. axes: as graph/axes.py writes them. The rest is as in OpRecord,
    except `fake`.
    """

    def register(reference: F) -> F:
        name = reference.__name__
        defaults = {p.name: p.default for p in inspect.signature(reference).parameters.values()}

        def fake_kernel(*args: Any, **kwargs: Any) -> Any:
            return fake(SimpleNamespace(**{**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}))

        # Numbers are numbers: a size that changes from step to step is never an argument.
        schema = torch.library.infer_schema(reference, mutates_args=tuple(writes)).replace("SymInt", "int")
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"llmc::{name}", fake_kernel, lib=_LIBRARY)
        overload = getattr(torch.ops.llmc, name).default
        rule = None if axes is None else axis_rule(axes)
        RECORDS[overload] = OpRecord(
            name,
            overload,
            reference,
            frozenset(stages),
            rows,
            table,
            share,
            flops,
            check,
            part,
            takes,
            rule,
            least_part,
            across,
            linear_in,
            fallback,
        )
        return reference

    return register
