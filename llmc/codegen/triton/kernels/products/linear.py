"""llmc::linear, fused_linear, gated_linear, lm_head: y = activation(x·Wᵀ + bias)·scale + residual, or gated.

How W is stored decides between the kernels (storages.py), how x arrives what comes before them, and the op what is done
with the sums. One to four rows are bound by reading W (product_gemv), a few dozen too, on the matrix units
(product_narrow); many are bound by arithmetic (product_tile, product_persistent). All sum in fp32 and round once.
product_choice picks. Weights in codes: coded_product.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.storage import storage_for, storage_of
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.products.product import Epilogue
from llmc.codegen.triton.kernels.products.product_choice import product_launches
from llmc.codegen.triton.kernels.refusals import refuse_dtypes, refuse_ranks
from llmc.codegen.triton.storages import STORAGES
from llmc.graph.refusal import Refusal
from llmc.targets import GpuTarget

_llmc = torch.ops.llmc


def supports(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """x: [rows, channels] and residual of one float dtype, and what the weight's storage asks for."""
    storage = storage_for(STORAGES, node, target.name)
    if isinstance(storage, Refusal):
        return storage
    found = refuse_dtypes(node, "x", "residual") or refuse_ranks(
        node, x=(2, 3) if node.target is _llmc.lm_head.default else (2,)
    )
    return found or storage.refusal(node, target)


# Storages whose kernels apply the norm where they round x.
OF_CODES = frozenset({_llmc.dequantize.default, _llmc.sparse_codes.default})
OF_ALL = OF_CODES | {None, _llmc.sparse_bitmask.default}


def product_template(op: Any, epilogue: Callable[[Call], Epilogue], normed: frozenset[Any]) -> KernelTemplate:
    """The kernels of a product of matrices, whatever stores its weight. normed: as of KernelTemplate."""

    def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
        product = storage_of(STORAGES, call).product(call, epilogue(call))
        return product_launches(product, target)

    return KernelTemplate(op, supports, candidates, normed=normed)


def _fused(call: Call) -> Epilogue:
    return Epilogue(call.plain("activation"), call.plain("scale"), call.rows("residual"))


def _gated(call: Call) -> Epilogue:
    return Epilogue(call.plain("activation"), gated=True)


linear = product_template(_llmc.linear.default, lambda call: Epilogue(), OF_ALL)
fused_linear = product_template(_llmc.fused_linear.default, _fused, OF_CODES)
gated_linear = product_template(_llmc.gated_linear.default, _gated, OF_ALL)
# Its rows are those of logits, and the room for a normed x is that of tokens.
lm_head = product_template(_llmc.lm_head.default, lambda call: Epilogue(in_fp32=True), frozenset())
