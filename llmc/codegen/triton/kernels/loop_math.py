"""The functions of generated loops that Triton has no name for: fp32 (or int32) in and out, as the graph means them."""

import triton
import triton.language as tl


@triton.jit
def power(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """x ** y; NaN for a negative x with a fractional y, as in C."""
    magnitude = tl.exp2(y * tl.log2(tl.abs(x)))
    is_whole = tl.floor(y) == y
    is_odd = is_whole & (tl.floor(y * 0.5) * 2.0 != y)
    signed = tl.where(is_odd, -magnitude, tl.where(is_whole, magnitude, float("nan")))
    return tl.where(y == 0.0, 1.0, tl.where(x < 0.0, signed, magnitude))


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """The hyperbolic tangent, to 1e-7."""
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), and x itself where that is the same in fp32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def floor_div_float(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """x / y rounded down."""
    return tl.floor(x / y)


@triton.jit
def floor_div_int(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """x / y rounded down; Triton's own division of integers rounds towards zero."""
    quotient = x // y
    return tl.where((x - quotient * y != 0) & ((x < 0) != (y < 0)), quotient - 1, quotient)


@triton.jit
def remainder_float(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The remainder of floor division, with the sign of y."""
    return x - tl.floor(x / y) * y


@triton.jit
def remainder_int(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The remainder of floor division, with the sign of y."""
    rest = x - (x // y) * y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)
