"""The activations of llmc.ops.activation as device code: fp32 in, fp32 out."""

import triton
import triton.language as tl


@triton.jit
def activate(x: tl.tensor, NAME: tl.constexpr) -> tl.tensor:
    if NAME == "silu":
        x = x * _sigmoid(x)
    elif NAME == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        x = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif NAME == "relu":
        x = tl.maximum(x, 0.0)
    elif NAME == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif NAME == "quick_gelu":
        x = x * _sigmoid(1.702 * x)
    elif NAME == "sigmoid":
        x = _sigmoid(x)
    elif NAME == "tanh":
        x = 2.0 * _sigmoid(2.0 * x) - 1.0
    else:
        tl.static_assert(NAME == "identity", "unknown activation")
    return x


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))
