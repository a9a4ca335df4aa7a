"""A matrix product as its kernels see it: the arguments that they all share, and the sizes that decide between them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import fx

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, rows
from llmc.codegen.triton.kernels.products.product_way import Way
from llmc.codegen.triton.kernels.refusals import IDS, refuse_dtypes, tensors_of
from llmc.codegen.triton.kernels.rows.norm_rows import norm_launch
from llmc.formats.code_format import CODE_FORMATS
from llmc.graph.refusal import Refusal
from llmc.program import Layout
from llmc.program.launch_arguments import Argument, Count, Operand, Rows
from llmc.targets import GpuTarget

_DESCRIPTOR_ALIGNMENT = 16
# A row stride that is a multiple of this is compiled as such; the stores of a wide tile need it to fit in registers.
_ELEMENTS_KNOWN_ALIGNED = 16


@dataclass(frozen=True)
class Norm:
    """The RMS norm that x goes through first. arguments: norm_ptr and eps, for kernels that norm on the way.

    launch: norms x into a workspace for the others; normed: x_ptr and x_row_stride there.
    """

    arguments: dict[str, Argument]
    launch: DeviceLaunch
    normed: dict[str, Argument]


@dataclass(frozen=True)
class Codes:
    """How W is quantized. format, x_format: the op's. group: columns that are summed before they are scaled; None for
    all of a row.

    nbytes: of W, with all that its scales are made of. quantize: rounds x to codes into a workspace, where the kernels
    find it. as_numbers: the product of a few tokens, of the numbers that x's codes stand for.
    """

    format: str
    x_format: str
    group: int | None
    nbytes: int
    quantize: DeviceLaunch | None
    as_numbers: "Product | None" = None

    @property
    def per_byte(self) -> int:
        """Codes that have their low bits, or all, in one byte."""
        return 1 if CODE_FORMATS[self.format].bits == 8 else 2

    @property
    def in_planes(self) -> bool:
        """Whether the others lie apart."""
        return CODE_FORMATS[self.format].in_planes


@dataclass(frozen=True)
class Sparse:
    """A W stored without zeros (mask_rows.py). arguments: masks_ptr and starts_ptr. nbytes: size of W with masks,
    starts and the scales of codes."""

    arguments: dict[str, Argument]
    nbytes: int


@dataclass(frozen=True)
class Expansion:
    """A launch that writes W to a workspace, and the product that reads it there.

    nbytes: size of the workspace. instructions: of the launch, for each element of W. least_rows: number of rows of x
    from which this is a candidate. ways: those in which that product is computed; None for all.
    """

    launch: DeviceLaunch
    product: "Product"
    nbytes: int
    instructions: int
    least_rows: int
    ways: frozenset[Way] | None = None


# The arguments of kernels that know masks, of a W that has none.
WITHOUT_MASKS: Mapping[str, Argument] = MappingProxyType({"masks_ptr": None, "starts_ptr": None})
# And of a product to which adapters add nothing.
WITHOUT_DELTA: Mapping[str, Argument] = MappingProxyType({**rows("delta", None), "adapters_ptr": None})


@dataclass(frozen=True)
class Product:
    """y = x·Wᵀ and what follows. arguments, constants: by the parameters' names, those of every product kernel.

    count: of rows, T, L, several for each of them, or a number. channels: of x. outputs: of y; gated, W has twice as
    many rows. itemsize: bytes of an element of x and W; result_itemsize: of y. has_aligned_rows: whether tensor
    descriptors can read x and W, and a wide tile of y can be stored in whole vectors. norm: what x goes through first,
    if anything. codes: of a quantized W, which only the kernels for codes read. sparse: of a W without its zeros, which
    only some kernels read. expansion: how W becomes one that other kernels read.
    """

    call: Call
    arguments: dict[str, Argument]
    constants: dict[str, Constant]
    count: Count | Rows | int
    channels: int
    outputs: int
    gated: bool
    itemsize: int
    result_itemsize: int
    has_aligned_rows: bool = False
    norm: Norm | None = None
    codes: Codes | None = None
    sparse: Sparse | None = None
    expansion: Expansion | None = None

    @property
    def weight_rows(self) -> int:
        """Rows of W."""
        return self.outputs * (2 if self.gated else 1)

    @property
    def weight_nbytes(self) -> int:
        """Size of W as it is stored."""
        if self.sparse is not None:
            return self.sparse.nbytes
        return self.weight_rows * self.channels * self.itemsize if self.codes is None else self.codes.nbytes

    def bytes_moved(self, tokens: int) -> int:
        """W, x, the residual and y, each once."""
        residual = 0 if self.arguments["residual_ptr"] is None else self.itemsize
        x, y = self.channels * self.itemsize, self.outputs * (self.result_itemsize + residual)
        return self.weight_nbytes + tokens * (x + y)

    def operations(self, tokens: int) -> int:
        """Multiplications and additions."""
        return 2 * tokens * self.weight_rows * self.channels


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of a product: activation(sum + bias)·scale + residual, or activation(gate)·up if gated.

    in_fp32: whether the result is fp32 even if x is not.
    """

    activation: str = "identity"
    scale: float = 1.0
    residual: Operand | None = None
    gated: bool = False
    in_fp32: bool = False


def most_rows(call: Call, count: Count | Rows | int) -> int:
    """The number of rows, given as a count of a step, in the largest step."""
    limits = call.limits()
    return count if isinstance(count, int) else count.at({"T": limits.max_batch_tokens, "L": limits.max_logit_rows})


def dense_refusal(node: fx.Node, target: GpuTarget) -> Refusal | None:
    """A weight of a float dtype, or a table of ids; of a product not wider than x's, since it is stored as that."""
    tensors = tensors_of(node)
    x, weight = tensors.get("x"), tensors["weight"]
    if x is not None and weight.dtype.itemsize > x.dtype.itemsize:
        return Refusal(f"the weight is {weight.dtype} but x is {x.dtype}: storing it as that would lose digits", node)
    if x is None and weight.dtype is not node.meta["val"].dtype:
        return Refusal(f"the table is {weight.dtype} but the result {node.meta['val'].dtype}", node)
    return None if x is None and weight.dtype in IDS else refuse_dtypes(node, "weight")


def dense_product(call: Call, epilogue: Epilogue) -> Product:
    """The product that a node asks for, of a weight in rows; and of x as it is, or after a norm."""
    out, channels = call.shape("weight")
    return rows_product(call, epilogue, (out, channels), call.weight("weight", Layout.ROWS))


def rows_product(call: Call, epilogue: Epilogue, shape: tuple[int, int], weight: Operand) -> Product:
    """The same of elements [out, in] that lie anywhere."""
    norm, channels = call.within("x"), shape[1]
    x, residual, y = (norm or call).rows("x"), epilogue.residual, call.result()
    assert x is not None
    product = product_of(call, epilogue, norm or call, shape, {**rows("x", x), "weight_ptr": weight})
    read = (x.stride or 0, channels, x.offset)
    written = (each.stride or 0 for each in (residual, y) if each is not None)
    is_aligned = all(stride * product.itemsize % _DESCRIPTOR_ALIGNMENT == 0 for stride in read)
    return replace(
        product,
        has_aligned_rows=is_aligned and all(stride % _ELEMENTS_KNOWN_ALIGNED == 0 for stride in written),
        norm=None if norm is None else _norm(call, norm, channels),
    )


def product_of(
    call: Call, epilogue: Epilogue, source: Call, shape: tuple[int, int], operands: Mapping[str, Argument]
) -> Product:
    """The product with any weight [out, in]. source: the call whose x is read. operands: pointers to x and weight."""
    weight_rows, channels = shape
    outputs = weight_rows // 2 if epilogue.gated else weight_rows
    count, itemsize = source.count("x"), source.dtype("x").itemsize
    arguments: dict[str, Argument] = {
        **operands,
        "bias_ptr": call.vector("bias"),
        **delta_arguments(call),
        **rows("residual", epilogue.residual),
        **rows("y", call.result()),
        "tokens": count,
        "scale": epilogue.scale,
    }
    return Product(
        call,
        arguments,
        {"IN": channels, "OUT": outputs, "GATED": epilogue.gated, "ACTIVATION": epilogue.activation},
        count,
        channels,
        outputs,
        epilogue.gated,
        itemsize,
        4 if epilogue.in_fp32 else itemsize,
    )


def delta_arguments(call: Call) -> Mapping[str, Argument]:
    """The arguments for the adapters' delta, which is added to a product's sums, and for each token's adapter."""
    if "delta" not in call.names() or call.plain("delta") is None:
        return WITHOUT_DELTA
    return {**rows("delta", call.rows("delta")), "adapters_ptr": call.vector("adapters")}


def _norm(call: Call, norm: Call, channels: int) -> Norm:
    workspace = call.workspace("normed", Count.TOKENS, channels, norm.dtype("x"))
    arguments: dict[str, Argument] = {"norm_ptr": norm.vector("weight"), "eps": float(norm.plain("eps"))}
    return Norm(arguments, norm_launch(norm, workspace), rows("x", workspace))
