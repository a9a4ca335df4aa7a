"""Ops that stand for several others, written in these: rules of normalize_ops."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.passes.node_rules import Call, Rule

aten = torch.ops.aten


def _baddbmm(node: fx.Node) -> Call:
    arguments = call_arguments(node)
    product: Any = Call(aten.matmul.default, (arguments["batch1"], arguments["batch2"]))
    if arguments["alpha"] != 1:
        product = Call(aten.mul.Tensor, (product, arguments["alpha"]))
    added: Any = arguments["self"]
    if arguments["beta"] != 1:
        added = Call(aten.mul.Tensor, (added, arguments["beta"]))
    return Call(aten.add.Tensor, (product, added))


def _clamp(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    value: Any = arguments["self"]
    if arguments["min"] is not None:
        value = Call(aten.maximum.default, (value, arguments["min"]))
    if arguments["max"] is not None:
        value = Call(aten.minimum.default, (value, arguments["max"]))
    return value if isinstance(value, Call) else None


def _log_sigmoid(node: fx.Node) -> Call:
    negative = Call(aten.neg.default, (node.args[0],))
    return Call(aten.neg.default, (Call(aten.softplus.default, (negative,)),))


def _logsumexp(node: fx.Node) -> Call:
    arguments = call_arguments(node)
    x, dims, keepdim = (arguments[name] for name in ("self", "dim", "keepdim"))
    less = Call(aten.sub.Tensor, (x, Call(aten.amax.default, (x, dims, True))))
    total = Call(aten.sum.dim_IntList, (Call(aten.exp.default, (less,)), dims, keepdim))
    return Call(aten.add.Tensor, (Call(aten.log.default, (total,)), Call(aten.amax.default, (x, dims, keepdim))))


def _rsub(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    if arguments["alpha"] != 1:
        return None
    negative = Call(aten.neg.default, (arguments["self"],))
    return Call(aten.add.Tensor, (negative, arguments["other"]))


def _square(node: fx.Node) -> Call:
    return Call(aten.pow.Tensor_Scalar, (node.args[0], 2))


def _std(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    if arguments["unbiased"] or not arguments["keepdim"] or arguments["dim"] is None:
        return None
    x, dims = arguments["self"], arguments["dim"]
    apart = Call(aten.sub.Tensor, (x, Call(aten.mean.dim, (x, dims, True))))
    return Call(aten.sqrt.default, (Call(aten.mean.dim, (Call(aten.pow.Tensor_Scalar, (apart, 2)), dims, True)),))


def _vector_norm(node: fx.Node) -> Call | None:
    arguments = call_arguments(node)
    x, dims, keepdim = arguments["self"], arguments["dim"], arguments["keepdim"]
    if dims is None or arguments["dtype"] is not None or arguments["ord"] not in (1, 2):
        return None
    if arguments["ord"] == 1:
        return Call(aten.sum.dim_IntList, (Call(aten.abs.default, (x,)), dims, keepdim))
    squares = Call(aten.pow.Tensor_Scalar, (x, 2))
    return Call(aten.sqrt.default, (Call(aten.sum.dim_IntList, (squares, dims, keepdim)),))


IN_SIMPLER_ONES: Mapping[Any, Rule] = MappingProxyType(
    {
        aten.baddbmm.default: _baddbmm,
        aten.clamp.Tensor: _clamp,
        aten.linalg_vector_norm.default: _vector_norm,
        aten.log_sigmoid.default: _log_sigmoid,
        aten.logsumexp.default: _logsumexp,
        aten.rsub.Scalar: _rsub,
        aten.square.default: _square,
        aten.std.dim: _std,
    }
)
