"""A program on paper: one launch for each op that is not fused, and one for each loop, for no machine's kernels.

It says of any target what a step reads, computes and exchanges, and which memory a rank needs, without a compiler and
before kernels exist: what explains a plan, and what simulates it.
"""

import math
from collections.abc import Sequence

import torch
from torch import fx

from llmc.codegen.backend import KernelCall
from llmc.codegen.call import Call, arguments_of
from llmc.codegen.expand_sparse import SPARSE
from llmc.codegen.kernel_ir import Loop
from llmc.codegen.lowering import plan_step
from llmc.errors import LoweringError
from llmc.graph.dtype_names import DTYPE_NAMES
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.ops.sparse_weight import MASK_BITS
from llmc.options import BuildOptions
from llmc.program import LOOP, Layout, Program
from llmc.program.launch_arguments import Argument, Operand

_CACHES = ("k_cache", "v_cache")


def sketch(graph: ModelGraph, options: BuildOptions) -> Program:
    """The program of a graph of stage serving or optimized. Raises LoweringError for work that no loop can do."""
    return plan_step(graph, SketchBackend(graph), options).program


class SketchBackend:
    """As Backend. Every op has a kernel, which reads what the op reads; weights lie in rows."""

    float_dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.uint8})
    has_panels = False
    has_free_rows = False

    def __init__(self, graph: ModelGraph) -> None:
        self._weights = graph.weights.keys()

    def refusal(self, node: fx.Node) -> Refusal | None:
        """Return None, because every op has a kernel."""

    def taken_in(self, node: fx.Node) -> None:
        """Kernels compute parts of products on the way, nothing else."""

    def in_place(self, node: fx.Node) -> tuple[tuple[str, int], ...]:
        return ()

    def calls(self, node: fx.Node, call: Call) -> tuple[tuple[KernelCall, ...], ...]:
        arguments = self._operands(node, call)
        value = node.meta["val"]
        results = len(value) if isinstance(value, tuple | list) else int(value is not None)
        arguments |= {f"result{index}": call.result(index) for index in range(results)}
        name = str(node.target).removeprefix("llmc.").removesuffix(".default")
        return ((KernelCall(name, name, arguments, _dtypes(node)),),)

    def nbytes(self, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> int:
        bits = layout.code_bits or 8 * (4 if layout is Layout.VECTOR_F32 else dtype.itemsize)
        return math.prod(shape[:-1]) * -(-shape[-1] * bits // 8) if shape else bits // 8

    def panels_nbytes(
        self, shape: tuple[int, ...], scales: torch.Tensor, has_zeros: bool, format: str, layout: Layout
    ) -> int:
        raise LoweringError("sketches store codes row by row", at=f"layout {layout.value}")

    def sparse_nbytes(
        self, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype, count: int, scales: torch.Tensor | None
    ) -> int:
        masks = 8 * shape[0] * -(-shape[1] // MASK_BITS)
        return masks + count * dtype.itemsize + (0 if scales is None else scales.numel() * scales.dtype.itemsize)

    def loop_call(self, name: str, loop: Loop, pointers: Sequence[Operand]) -> KernelCall:
        return KernelCall(name, LOOP, {f"p{index}": pointer for index, pointer in enumerate(pointers)})

    def _operands(self, node: fx.Node, call: Call) -> dict[str, Argument]:
        arguments: dict[str, Argument] = {}
        for name, argument in arguments_of(node).items():
            if not isinstance(argument, fx.Node):
                continue
            part = call.within(name)
            if part is not None:
                arguments |= self._part(name, argument, part)
            elif name in _CACHES:
                arguments[name] = call.cache(name)
            elif argument.name in self._weights and argument.meta["val"].dim() > 1:
                arguments[name] = call.weight(name, Layout.ROWS)
            else:
                operand = call.vector(name) if argument.op == "placeholder" else call.rows(name)
                assert operand is not None
                arguments[name] = operand
        return arguments

    def _part(self, name: str, node: fx.Node, call: Call) -> dict[str, Argument]:
        """The arguments of a product's kernel in place of a claimed one: codes, or the original x."""
        if node.target in SPARSE:
            dtype = call.dtype("values")
            layout = Layout.SPARSE_PANELS if dtype.is_floating_point else Layout.SPARSE_CODE_PANELS
            return {name: call.sparse_panels(layout, dtype)}
        if "codes" in arguments_of(node):
            return {f"{name}_{part}": operand for part, operand in call.code_rows().items() if operand is not None}
        return {f"{name}_{own}": operand for own, operand in self._operands(node, call).items()}


def _dtypes(node: fx.Node) -> tuple[str, ...]:
    first = next((n.meta["val"] for n in node.all_input_nodes if n.op != "placeholder"), None)
    is_float = isinstance(first, torch.Tensor) and first.dtype.is_floating_point
    return (DTYPE_NAMES[first.dtype],) if is_float and isinstance(first, torch.Tensor) else ()
