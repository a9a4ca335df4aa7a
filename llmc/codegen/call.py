"""How a kernel table sees the node that it is asked to launch: the node's arguments as operands, counts and numbers."""

from typing import Any, Protocol

import torch
from torch import fx
from torch._ops import OpOverload

from llmc.graph.call_arguments import call_arguments
from llmc.program import Layout, Limits
from llmc.program.launch_arguments import Count, Operand, Rows

# What Call.code_rows gives: a quantized weight's arguments, with one part for the steps of scales and minima.
CODE_ROW_PARTS = ("codes", "scales", "zeros", "minima", "steps")


class RowsCall(Protocol):
    """What is called on numbers in memory: how its arguments become a launch's. `name` is the argument's in the op's
    schema."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor argument, without its row axis."""

    def count(self, name: str) -> Count | Rows | int:
        """How many rows a tensor argument has."""

    def plain(self, name: str) -> Any:
        """An argument that is no tensor."""

    def rows(self, name: str) -> Operand | None:
        """A tensor argument as rows (pointer and row stride); None if the op is called without it."""

    def result(self, index: int = 0) -> Operand:
        """Where to write a result, as rows."""

    def vector(self, name: str) -> Operand | None:
        """A weight as an fp32 vector, or a computed fp32 or int32 tensor as a contiguous one."""

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor argument."""

    def workspace(self, name: str, rows: Count | Rows | int, columns: int, dtype: torch.dtype) -> Operand:
        """Memory for what passes between the node's own launches, as rows. rows: a count, or 1."""

    def limits(self) -> Limits:
        """What a step may hold at most, for memory whose size no row count says."""


class Call(RowsCall, Protocol):
    """A node to be called: with weights, caches, and the nodes around it, too."""

    @property
    def op(self) -> Any:
        """What is called."""

    def within(self, name: str) -> "Call | None":
        """The call that yields an argument, where the kernel computes that on the way: of a part of a product."""

    def names(self) -> tuple[str, ...]:
        """Of the arguments."""

    def producer(self, name: str, index: int) -> "Call | None":
        """The call whose result of that index an argument is; None for what is no such result. Calls of one node are
        equal."""

    def readers(self, index: int) -> "tuple[Call, ...]":
        """The calls that read a result, of an op with several."""

    def weight(self, name: str, layout: Layout) -> Operand:
        """A weight in a layout."""

    def code_panels(self, layout: Layout) -> Operand:
        """A quantized weight, the arguments of CODE_PARTS and its format, in a layout."""

    def sparse_panels(self, layout: Layout, dtype: torch.dtype) -> Operand:
        """A sparse weight, the arguments values, masks, columns and, of codes, scales, in a layout. dtype: of its
        elements there."""

    def sparse_rows(self, dtype: torch.dtype) -> tuple[Operand, Operand, Operand]:
        """The same weight's elements, as of dtype, masks as bytes and where each row's elements begin, each by
        itself."""

    def code_rows(self) -> dict[str, Operand | None]:
        """The same arguments, each by itself, by the names in CODE_ROW_PARTS: codes row-major (code_rows_layout), steps
        of scales and minima in one. None for what the weight does not have."""

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
    """The node's arguments by schema name, defaults filled in; none of what has no schema."""
    return call_arguments(node) if isinstance(node.target, OpOverload) else {}
