"""Matrix products, of weights that are numbers and of weights that are codes, and lookups in tables of codes.

An initializer of codes represents their numbers here (codes.py, linear_codes.py, own_codes.py): [out, in].
"""

import torch
from torch import Tensor
from torch.nn import functional

from llmc.frontends.onnx.call import Call, Translated, Translations
from llmc.frontends.onnx.linear_codes import LINEAR, has_columns_first
from llmc.frontends.onnx.own_codes import DEQUANTIZE


def _matmul(call: Call) -> Translated:
    return torch.matmul(call.tensor(0), call.tensor(1))


def _gemm(call: Call) -> Translated:
    call.unless(call.real("alpha", 1.0) == 1 and call.real("beta", 1.0) == 1, "it scales its operands")
    x, weight, bias = call.tensor(0), call.tensor(1), call.optional(2)
    x = x.t() if call.integer("transA", 0) else x
    return functional.linear(x, weight if call.integer("transB", 0) else weight.t(), bias)


def _fused_matmul(call: Call) -> Translated:
    plain = not call.integer("transBatchA", 0) and not call.integer("transBatchB", 0)
    call.unless(plain, "it transposes batches")
    first, second = call.tensor(0), call.tensor(1)
    first = first.transpose(-2, -1) if call.integer("transA", 0) else first
    second = second.transpose(-2, -1) if call.integer("transB", 0) else second
    product = torch.matmul(first, second)
    scale = call.real("alpha", 1.0)
    return product if scale == 1 else product * scale


def _coded_matmul(call: Call) -> Translated:
    x, weight = call.tensor(0), call.tensor(1)
    expected = (call.integer("N"), call.integer("K"))
    call.unless(tuple(weight.shape) == expected, f"its weight is {list(weight.shape)}, expected {list(expected)}")
    return functional.linear(x, weight, call.optional(5))


def _coded_lookup(call: Call) -> Translated:
    table: Tensor = call.tensor(0)
    call.unless(call.integer("gather_axis", 0) % 2 == 0, "it gathers columns")
    return functional.embedding(call.tensor(1), table)


def _linear_codes(call: Call) -> Translated:
    weight = call.tensor(0)
    return weight.t() if has_columns_first(call.node) else weight


def _own_codes(call: Call) -> Translated:
    return call.tensor(0)


PRODUCTS: Translations = {
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", LINEAR): _linear_codes,
    ("llmc", DEQUANTIZE): _own_codes,
    ("com.microsoft", "FusedMatMul"): _fused_matmul,
    ("com.microsoft", "MatMulNBits"): _coded_matmul,
    ("com.microsoft", "GatherBlockQuantized"): _coded_lookup,
}
