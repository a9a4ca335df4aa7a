"""What lowering asks of a kind of target: which kernels it has, and how a launch of one is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx

from llmc.codegen.call import Argument, Call
from llmc.codegen.kernel_ir import Loop
from llmc.graph.refusal import Refusal
from llmc.program import RowRange


@dataclass(frozen=True)
class KernelCall:
    """The part of a launch (llmc.program.Launch) that a backend decides.

    seconds: predicted of a group, with the call that does the work. others: of the first call, groups that could stand
    for it.
    """

    kernel: str
    arguments: dict[str, Argument]
    grid: tuple[str, ...] = ()
    only: RowRange | None = None
    seconds: float | None = None
    others: tuple[tuple[KernelCall, ...], ...] = ()


class Backend(Protocol):
    """The kernels of one target. An object may serve one lowering only: it may remember what it was asked for."""

    @property
    def float_dtypes(self) -> frozenset[torch.dtype]:
        """Of activations, weights and caches."""
        ...

    @property
    def has_panels(self) -> bool:
        """Whether matrix products read weights in panels; an embedding then shares a product's panels."""
        ...

    def refusal(self, node: fx.Node) -> Refusal | None:
        """Why no kernel can compute the node, or None."""
        ...

    def in_place(self, node: fx.Node) -> tuple[tuple[str, int], ...]:
        """Arguments of the node's kernel that may lie where a result goes, and which result."""
        ...

    def calls(self, node: fx.Node, call: Call) -> tuple[tuple[KernelCall, ...], ...]:
        """The launches that compute the node: groups in order, of which each starts with the one that does the work.

        Groups with different `only` are alternatives to each other.
        """
        ...

    def loop_call(self, name: str, loop: Loop, pointers: Sequence[str]) -> KernelCall:
        """The launch of a generated loop. pointers: operands of its parameters."""
        ...
