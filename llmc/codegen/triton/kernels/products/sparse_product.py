"""Products of weights without their zeros, of elements or codes: the arguments of the kernels that put these between.

They are the kernels of dense weights and of codes, which get a tile from sparse_tile.py in the place of a load, so that
every epilogue, norm and split is theirs. With many tokens each of their tiles would do that again: a launch before then
writes the weight with its zeros, and whatever reads dense ones follows.
"""

import math
from dataclasses import replace

import torch
from torch import fx

from llmc.codegen.call import Call, arguments_of, stored_weight
from llmc.codegen.triton.code_rows import row_bytes
from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.codegen.triton.kernels.products.coded_product import codes_product, refuse_arrival, refuse_groups
from llmc.codegen.triton.kernels.products.product import Epilogue, Expansion, Product, Sparse, rows_product
from llmc.codegen.triton.kernels.products.product_way import MOST_GEMV_ROWS
from llmc.codegen.triton.kernels.products.sparse_tile import expand_rows_kernel
from llmc.codegen.triton.kernels.products.sparse_ways import INSTRUCTIONS
from llmc.codegen.triton.kernels.refusals import FLOATS, refuse_dtypes
from llmc.codegen.triton.mask_rows import mask_nbytes
from llmc.graph.product_parts import unrounded_parts, x_of
from llmc.graph.refusal import Refusal
from llmc.program import Layout
from llmc.program.launch_arguments import Operand
from llmc.targets import GpuTarget

# Rows of a program that expands a sparse weight, and columns that it expands at a time.
_EXPANDED_ROWS, _EXPANDED_COLUMNS = 8, 256


def sparse_refusal(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """Elements of a float dtype, of a product not wider than x's, since they are stored as that."""
    values = arguments_of(unrounded_parts(node)["weight"])["values"].meta["val"].dtype
    is_product = "x" in arguments_of(node)
    read = x_of(node).meta["val"].dtype if is_product else node.meta["val"].dtype
    if values not in FLOATS or values.itemsize > read.itemsize:
        return Refusal(f"the weight is {values} but read as {read}: storing it as that would lose digits", node)
    return refuse_dtypes(node, "x") if is_product else None


def sparse_codes_refusal(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """Refuse what products of the same codes with their zeros refuse."""
    stored = unrounded_parts(node)["weight"]
    scales, columns = arguments_of(stored)["scales"].meta["val"], arguments_of(stored)["columns"]
    return refuse_groups(node, scales, columns, arguments_of(stored)["format"]) or refuse_arrival(
        node, target, has_zeros=False
    )


def sparse_product(call: Call, epilogue: Epilogue) -> Product:
    """The product that a node asks for, of elements behind masks; and of x as it is, or after a norm."""
    stored, dtype = stored_weight(call), (call.within("x") or call).dtype("x")
    values, sparse = _sparse(call, stored, dtype)
    shape = stored.shape("masks")[0], stored.plain("columns")
    return _expandable(rows_product(call, epilogue, shape, values), sparse, "weight_ptr", shape[1], dtype)


def sparse_codes_product(call: Call, epilogue: Epilogue) -> Product:
    """The same of codes; and of x as it is, or rounded to codes."""
    stored = stored_weight(call)
    codes, sparse = _sparse(call, stored, torch.int8)
    shape, scales = (stored.shape("masks")[0], stored.plain("columns")), stored.weight("scales", Layout.ROWS)
    product = codes_product(call, epilogue, stored, shape, {"codes": codes, "scales": scales})
    return _expandable(product, sparse, "codes_ptr", row_bytes(shape[1], Layout.CODE_ROWS), torch.int8)


def _sparse(call: Call, stored: Call, dtype: torch.dtype) -> tuple[Operand, Sparse]:
    """Return the operand of the elements, of dtype, and the record that gives their places."""
    values, masks, starts = stored.sparse_rows(dtype)
    nbytes = math.prod(stored.shape("values")) * dtype.itemsize
    nbytes += sum(mask_nbytes(stored.shape("masks"), layout) for layout in (Layout.MASK_ROWS, Layout.MASK_STARTS))
    if stored.op is torch.ops.llmc.sparse_codes.default:
        nbytes += math.prod(stored.shape("scales")) * stored.dtype("scales").itemsize
    return values, Sparse({"masks_ptr": masks, "starts_ptr": starts}, nbytes)


def _expandable(product: Product, sparse: Sparse, pointer: str, width: int, dtype: torch.dtype) -> Product:
    """The product with `sparse`, or of its weight with all zeros in rows of `width` elements of dtype. pointer: which
    argument of `product` refers to the elements."""
    out = product.weight_rows
    dense = product.call.workspace("expanded", 1, out * width, dtype).pointer
    launch = DeviceLaunch(
        expand_rows_kernel,
        {"values_ptr": product.arguments[pointer], **sparse.arguments, "y_ptr": dense},
        {"COLUMNS": product.channels, "WIDTH": width, "OUT": out, "ROWS": _EXPANDED_ROWS, "BLOCK": _EXPANDED_COLUMNS},
        (str(-(-out // _EXPANDED_ROWS)),),
    )
    whole = replace(product, arguments={**product.arguments, pointer: dense})
    expansion = Expansion(launch, whole, out * width * dtype.itemsize, INSTRUCTIONS, MOST_GEMV_ROWS + 1)
    return replace(product, sparse=sparse, expansion=expansion)
