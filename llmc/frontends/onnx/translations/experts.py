"""Mixtures of experts: onnxruntime's MoE and QMoE.

The weights of all experts are one matrix [experts · out, in] of numbers here, whether stored as numbers or as codes
(codes.py).
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmc.frontends.onnx.call import Call, Translated, Translations

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "relu": torch.relu,
        "gelu": partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
        "identity": lambda x: x,
    }
)


def _experts(call: Call, *, first: int, second: int, third: int, bias_after: int, chosen_by: int | None) -> Translated:
    """first, second, third: which inputs are the weights. bias_after: how many inputs later their biases are."""
    call.unless(not call.integer("use_sparse_mixer", 0), "it routes by a sparse mixer")
    x = call.tensor(0)
    rows = x.reshape(-1, x.shape[-1])
    router = call.tensor(1)
    experts = int(router.shape[-1])
    index, weights = _routed(call, router, None if chosen_by is None else call.optional(chosen_by))

    def product(x: Tensor, at: int) -> Tensor:
        bias = call.optional(at + bias_after)
        flat = None if bias is None else bias.flatten()
        weight = call.tensor(at)
        # [experts, out, in]; codes are rows of all experts already.
        rows_of_all = weight.flatten(0, 1) if weight.dim() == 3 else weight
        outputs: Tensor = torch.ops.llmc.expert_linear.default(x, rows_of_all, flat, index, experts)
        return outputs

    y = _gated(call, product, rows, first, third)
    summed: Tensor = torch.ops.llmc.sum_experts.default(product(y, second), weights)
    return summed.reshape(x.shape)


def _routed(call: Call, router: Tensor, mixing: Tensor | None) -> tuple[Tensor, Tensor]:
    """(experts, weights): [T, slots] each."""
    count = call.integer("k", 1)
    if mixing is None:
        weights, index = torch.topk(torch.softmax(router.float(), -1), count)
    else:
        index = torch.topk(router, count).indices
        weights = torch.gather(mixing, -1, index)
    if call.integer("normalize_routing_weights", 0):
        weights = weights / weights.sum(-1, keepdim=True)
    return index, weights.to(router.dtype) if mixing is None else weights


def _gated(call: Call, product: Callable[[Tensor, int], Tensor], x: Tensor, first: int, third: int) -> Tensor:
    kind, fusion = call.text("activation_type", "relu"), call.integer("swiglu_fusion", 0)
    y = product(x, first)
    if kind == "swiglu":
        call.unless(not call.integer("swiglu_limit_after_activation", 0), "it clamps after the activation")
        if call.has(third):
            gate, up = y, product(x, third)
        else:
            call.unless(fusion in (1, 2), f"its gate and its other half lie by swiglu_fusion {fusion}")
            gate, up = (y[..., 0::2], y[..., 1::2]) if fusion == 1 else y.chunk(2, -1)
        return _swiglu(call, gate, up)
    activation = _ACTIVATIONS.get(kind)
    if activation is None:
        raise call.refused(f"its activation is {kind!r:.40}", fix=f"it may be swiglu, {', '.join(_ACTIVATIONS)}")
    y = activation(y)
    return y * product(x, third) if call.has(third) else y


def _swiglu(call: Call, gate: Tensor, up: Tensor) -> Tensor:
    """gate·sigmoid(alpha·gate)·(up + beta), of clamped values."""
    limit: Any = call.node.attributes.get("swiglu_limit")
    if limit is not None:
        gate, up = gate.clamp(max=float(limit)), up.clamp(-float(limit), float(limit))
    alpha, beta = call.real("activation_alpha", 1.0), call.real("activation_beta", 0.0)
    turned = functional.silu(gate) if alpha == 1 else gate * torch.sigmoid(gate * alpha)
    return turned * (up + beta if beta else up)


EXPERTS: Translations = {
    ("com.microsoft", "MoE"): partial(_experts, first=2, second=4, third=6, bias_after=1, chosen_by=None),
    ("com.microsoft", "QMoE"): partial(_experts, first=2, second=5, third=8, bias_after=2, chosen_by=14),
}
