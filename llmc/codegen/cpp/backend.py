"""The CPU's kernels, through the interface that lowering uses."""

from collections.abc import Sequence

import torch
from torch import fx

from llmc.codegen.backend import KernelCall, no_kernel
from llmc.codegen.call import Call
from llmc.codegen.cpp.kernel import DTYPES
from llmc.codegen.cpp.kernel_api import kernel_api
from llmc.codegen.cpp.kernel_library import function_name
from llmc.codegen.cpp.kernel_table import KERNELS
from llmc.codegen.cpp.pack import packed_nbytes
from llmc.codegen.cpp.pack_codes import CodeShape
from llmc.codegen.cpp.pack_sparse import sparse_shape
from llmc.codegen.kernel_ir import Loop
from llmc.graph.refusal import Refusal
from llmc.program import LOOP, Layout
from llmc.program.launch_arguments import Argument, Operand
from llmc.targets import CpuTarget


class CppBackend:
    """Calls of the C++ kernel table and of generated C++ loops."""

    float_dtypes: frozenset[torch.dtype] = frozenset(DTYPES)
    has_panels = True
    has_free_rows = True

    def __init__(self, target: CpuTarget) -> None:
        self._target = target

    def refusal(self, node: fx.Node) -> Refusal | None:
        kernel = KERNELS.get(node.target)
        return no_kernel(node, self._target.name, "cpp") if kernel is None else kernel.refusal(node, self._target)

    def taken_in(self, node: fx.Node) -> None:
        """Kernels compute parts of products on the way, nothing else."""

    def in_place(self, node: fx.Node) -> tuple[tuple[str, int], ...]:
        kernel = KERNELS.get(node.target)
        return kernel.in_place if kernel is not None else ()

    def calls(self, node: fx.Node, call: Call) -> tuple[tuple[KernelCall, ...], ...]:
        kernel = KERNELS[node.target]
        family = kernel.family if isinstance(kernel.family, str) else kernel.family(call)
        dtypes = kernel.element_types(call)
        function = function_name(family, dtypes)
        values: dict[str, Argument] = {
            name: value for name, value in kernel.arguments(call).items() if value is not None
        }
        fields = kernel_api().fields(function)
        assert values.keys() <= set(fields), f"{function} takes {fields}, and was given {tuple(values)}"
        arguments = {name: values[name] for name in fields if name in values}
        return kernel.groups(KernelCall(function, family, arguments, dtypes), call)

    def nbytes(self, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> int:
        return packed_nbytes(shape, layout, dtype)

    def panels_nbytes(
        self, shape: tuple[int, ...], scales: torch.Tensor, has_zeros: bool, format: str, layout: Layout
    ) -> int:
        return CodeShape(shape, int(scales.shape[1]), format, scales.dtype, has_zeros).nbytes(layout)

    def sparse_nbytes(
        self, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype, count: int, scales: torch.Tensor | None
    ) -> int:
        return sparse_shape(shape, layout, dtype, scales).nbytes(count)

    def loop_call(self, name: str, loop: Loop, pointers: Sequence[Operand]) -> KernelCall:
        arguments: dict[str, Argument] = {"rows": loop.rows.count}
        return KernelCall(name, LOOP, arguments | {f"p{i}": pointer for i, pointer in enumerate(pointers)})
