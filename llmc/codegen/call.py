"""A node as kernel tables see it: its arguments as operands, counts and numbers."""

from typing import Any, Protocol

import torch
from torch import fx
from torch._ops import OpOverload

from llmc.graph.call_arguments import call_arguments
from llmc.program import Layout, Limits
from llmc.program.launch_arguments import Count, Operand, Rows

# The keys of Call.code_rows: a quantized weight's arguments, with one part for the steps of scales and minima.
CODE_ROW_PARTS = ("codes", "scales", "zeros", "minima", "steps")


class RowsCall(Protocol):
    """A call on numbers in memory: converts its arguments to those of a launch. `name` is the argument's name in the
    op's schema."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor argument, without its row axis."""

    def count(self, name: str) -> Count | Rows | int:
        """The number of rows of a tensor argument."""

    def plain(self, name: str) -> Any:
        """An argument that is not a tensor."""

    def rows(self, name: str) -> Operand | None:
        """A tensor argument as rows (pointer and row stride); None if the op is called without it."""

    def result(self, index: int = 0) -> Operand:
        """Return the operand to which a result is written, as rows."""

    def vector(self, name: str) -> Operand | None:
        """A weight as an fp32 vector, or a computed fp32 or int32 tensor as a contiguous one."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor argument."""

    def workspace(self, name: str, rows: Count | Rows | int, columns: int, dtype: torch.dtype) -> Operand:
        """Memory for values passed between the node's own launches, as rows. rows: a count, or 1."""

    def limits(self) -> Limits:
        """The limits of a step, for memory whose size does not follow from a row count."""


class Call(RowsCall, Protocol):
    """The call of a node, with access to weights, caches and neighbouring nodes."""

    @property
    def op(self) -> Any:
        """The op that is called."""

    def within(self, name: str) -> "Call | None":
        """The call that yields an argument, if the argument is a part of a product that the kernel computes on the
        way."""

    def names(self) -> tuple[str, ...]:
        """The names of the arguments."""

    def producer(self, name: str, index: int) -> "Call | None":
        """The call whose result of that index is the argument; None if there is none. Calls of the same node are
        equal."""

    def readers(self, index: int) -> "tuple[Call, ...]":
        """The calls that read a result, of an op with several."""

    def weight(self, name: str, layout: Layout) -> Operand:
        """A weight in a layout."""

    def code_panels(self, layout: Layout) -> Operand:
        """A quantized weight, the arguments of CODE_PARTS and its format, in a layout."""

    def sparse_panels(self, layout: Layout, dtype: torch.dtype) -> Operand:
        """A sparse weight, the arguments values, masks, columns and, of codes, scales, in a layout. dtype: the dtype of
        its elements in that layout."""

    def sparse_rows(self, dtype: torch.dtype) -> tuple[Operand, Operand, Operand]:
        """A sparse weight as three operands: its elements in `dtype`, its masks as bytes, and the number of each
        row's first element."""

    def code_rows(self) -> dict[str, Operand | None]:
        """A quantized weight as separate operands, by the names in CODE_ROW_PARTS. Codes are row-major
        (code_rows_layout); steps of scales and minima are one operand. None for a part that the weight lacks."""

    def table(self, name: str) -> Layout:
        """The layout in which an embedding's weight is stored: PANELS if a product reads the same weight."""

    def cache(self, name: str) -> Operand:
        """A pointer to a cache, or to a pool of adapters."""

    def state(self, name: str) -> Operand:
        """The pointer to a state's slots."""

    def block_size(self) -> int:
        """Positions in a block of the cache."""


def stored_weight(call: Call) -> Call:
    """The call that yields the weight of a product or lookup whose weight is stored as something else."""
    stored = call.within("weight")
    assert stored is not None
    return stored


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by schema name, with defaults filled in; empty for a call without a schema."""
    return call_arguments(node) if isinstance(node.target, OpOverload) else {}
