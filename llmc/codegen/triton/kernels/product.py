"""A matrix product as its kernels see it: the arguments that they all share, and the sizes that decide between them."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.code_format import CODE_FORMATS
from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, rows
from llmc.launch_arguments import Argument, Count
from llmc.program import Layout

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
    """How W is quantized. format, x_format: the op's. group: columns that share a scale; None for all of a row.

    nbytes: of W, scales and zeros included. quantize: rounds x to codes into a workspace; coded: x_ptr, x_row_stride
    and x_scales_ptr there.
    """

    format: str
    x_format: str
    group: int | None
    nbytes: int
    quantize: DeviceLaunch | None
    coded: dict[str, Argument]

    @property
    def per_byte(self) -> int:
        """Codes that have their low bits, or all, in one byte."""
        return 1 if CODE_FORMATS[self.format].bits == 8 else 2

    @property
    def in_planes(self) -> bool:
        """Whether the others lie apart."""
        return CODE_FORMATS[self.format].in_planes


@dataclass(frozen=True)
class Product:
    """y = x·Wᵀ and what follows. arguments, constants: by the parameters' names, those of every product kernel.

    count: of rows, T or L or a number. channels: of x. outputs: of y; gated, W has twice as many rows. itemsize: bytes
    of an element of x and W; result_itemsize: of y. has_aligned_rows: whether tensor descriptors can read x and W, and
    a wide tile of y can be stored in whole vectors. norm: what x goes through first, if anything. codes: of a
    quantized W, which only the kernels for codes read.
    """

    call: Call
    arguments: dict[str, Argument]
    constants: dict[str, Constant]
    count: Count | int
    channels: int
    outputs: int
    gated: bool
    itemsize: int
    result_itemsize: int
    has_aligned_rows: bool
    norm: Norm | None = None
    codes: Codes | None = None

    @property
    def weight_rows(self) -> int:
        """Rows of W."""
        return self.outputs * (2 if self.gated else 1)

    def bytes_moved(self, tokens: int) -> int:
        """W, x, the residual and y, each once."""
        residual = 0 if self.arguments["residual_ptr"] is None else self.itemsize
        row = self.channels * self.itemsize
        weight = self.weight_rows * row if self.codes is None else self.codes.nbytes
        return weight + tokens * row + tokens * self.outputs * (self.result_itemsize + residual)

    def operations(self, tokens: int) -> int:
        """Multiplications and additions."""
        return 2 * tokens * self.weight_rows * self.channels


def product_of(
    call: Call, *, activation: str = "identity", scale: float = 1.0, has_residual: bool = False, gated: bool = False
) -> Product:
    """The product that a node asks for. A result in fp32 where x is not is lm_head's."""
    weight_rows, channels = call.shape("weight")
    x, y = call.rows("x"), call.result()
    residual = call.rows("residual") if has_residual else None
    assert x is not None
    itemsize = call.dtype("x").itemsize
    arguments: dict[str, Argument] = {
        **rows("x", x),
        "weight_ptr": call.weight("weight", Layout.ROWS),
        "bias_ptr": call.vector("bias"),
        **rows("residual", residual),
        **rows("y", y),
        "tokens": call.count("x"),
        "scale": scale,
    }
    outputs = weight_rows // 2 if gated else weight_rows
    read = (x.stride or 0, channels, x.offset)
    written = (each.stride or 0 for each in (residual, y) if each is not None)
    is_aligned = all(stride * itemsize % _DESCRIPTOR_ALIGNMENT == 0 for stride in read)
    return Product(
        call,
        arguments,
        {"IN": channels, "OUT": outputs, "GATED": gated, "ACTIVATION": activation},
        call.count("x"),
        channels,
        outputs,
        gated,
        itemsize,
        itemsize,
        is_aligned and all(stride % _ELEMENTS_KNOWN_ALIGNED == 0 for stride in written),
    )
