"""The backend interface for lowering: the kernels of a kind of target, and the form of their launches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import fx
from torch._ops import OpOverload

import llmc.ops  # noqa: F401  (registers the ops that are named here)
from llmc.codegen.call import Call
from llmc.codegen.kernel_ir import Loop
from llmc.graph.product_parts import part_of
from llmc.graph.refusal import Refusal
from llmc.program import Layout, RowRange, StepOutput
from llmc.program.launch_arguments import Argument, Operand


@dataclass(frozen=True)
class KernelCall:
    """The part of a launch (llmc.program.Launch) that a backend decides.

    wanted, sides: see Launch. moved: the bytes that the launch moves (see Launch), if they differ from the node's.
    seconds: the predicted seconds of a group, set on the call that does the work. others: other groups that could
    replace this one, set on its first call.
    """

    kernel: str
    family: str
    arguments: dict[str, Argument]
    dtypes: tuple[str, ...] = ()
    grid: tuple[str, ...] = ()
    only: RowRange | None = None
    wanted: tuple[StepOutput, ...] = ()
    sides: tuple[str, ...] = ()
    moved: str | None = None
    seconds: float | None = None
    others: "tuple[tuple[KernelCall, ...], ...]" = ()


_llmc = torch.ops.llmc


class Backend(Protocol):
    """The kernels of one target. An object may serve one lowering only: it may record the calls."""

    @property
    def float_dtypes(self) -> frozenset[torch.dtype]:
        """Floating-point dtypes of activations, weights and caches."""

    @property
    def has_panels(self) -> bool:
        """Whether matrix products read weights in panels; an embedding then shares a product's panels."""

    @property
    def has_free_rows(self) -> bool:
        """Whether unused rows of logits take no memory, because memory is mapped when it is first written."""

    def refusal(self, node: fx.Node) -> Refusal | None:
        """Return why no kernel can compute the node, or None."""

    def taken_in(self, node: fx.Node) -> fx.Node | Refusal | None:
        """The node before this one that its kernels can also compute, other than parts of products: a norm, or a sum
        over ranks. Returns a Refusal with the reason if they cannot, and None if the graph has no such node."""

    def in_place(self, node: fx.Node) -> tuple[tuple[str, int], ...]:
        """Arguments of the node's kernel that may lie where a result goes, and which result."""

    def calls(self, node: fx.Node, call: Call) -> tuple[tuple[KernelCall, ...], ...]:
        """The launches that compute the node: groups in order, each starting with the launch that does the work.

        Groups with different `only` or `wanted` are alternatives to each other.
        """

    def nbytes(self, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> int:
        """Bytes of a weight in a layout, including padding."""

    def panels_nbytes(
        self, shape: tuple[int, ...], scales: torch.Tensor, has_zeros: bool, format: str, layout: Layout
    ) -> int:
        """Bytes of a quantized weight [out, in] in code panels, with its scales and zeros."""

    def sparse_nbytes(
        self, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype, count: int, scales: torch.Tensor | None
    ) -> int:
        """Bytes of a weight [out, in] in sparse panels with `count` nonzero elements, including scales of codes."""

    def loop_call(self, name: str, loop: Loop, pointers: Sequence[Operand]) -> KernelCall:
        """The launch of a generated loop. pointers: operands of its parameters."""


# Ops of lowered graphs that a kind of target has no kernel for, and why. Every other op has one in each (tests/ops),
# except the parts of products, which products' kernels compute.
_OF_STAGES = {_llmc.hand_over.default: "it separates two stages of a model, which are compiled separately"}
_OF_CHOICES = {
    _llmc.paged_choose_keys.default: "keys are chosen on CPUs only; sequences up to the number of chosen keys "
    "(--max-model-len) need no choice"
}
WITHOUT_KERNEL: Mapping[str, Mapping[OpOverload, str]] = MappingProxyType(
    {"cpp": _OF_STAGES, "triton": _OF_STAGES | _OF_CHOICES}
)
_WITHIN_A_PRODUCT = "it is computed within the product that reads it, and multiply_unrounded has left it unchanged"


def no_kernel(node: fx.Node, target: str, kind: str) -> Refusal:
    """The refusal that a target has no kernel for a node's op, with the reason if known. kind: a key of
    WITHOUT_KERNEL."""
    reason = WITHOUT_KERNEL[kind].get(node.target) if isinstance(node.target, OpOverload) else None
    if part_of(node) is not None:
        reason = _WITHIN_A_PRODUCT
    return Refusal(f"no kernel for {target} computes {node.target}" + (f": {reason}" if reason else ""), node)
