"""The activations of llmc.ops.activation in standard ops."""

from llmc.codegen.onnx.function_body import Body, Operand


def activation(b: Body, x: Operand, name: str) -> str:
    """The named activation of an fp32 value."""
    if name == "identity":
        return b("Identity", x)
    if name in ("silu", "quick_gelu"):
        inner = x if name == "silu" else b("Mul", x, b.number(1.702))
        return b("Mul", x, b("Sigmoid", inner))
    if name in ("gelu", "gelu_tanh"):
        return b("Gelu", x, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "relu2":
        positive = b("Relu", x)
        return b("Mul", positive, positive)
    return b({"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh"}[name], x)
