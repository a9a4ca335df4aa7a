"""Norms, alone and with the residual sum before them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor
from torch.nn import functional

from llmc.graph.onnx.call import Call, Translated

_MICROSOFT = "com.microsoft"


def _over_last(call: Call, x: Tensor) -> None:
    call.unless(call.integer("axis", -1) % x.dim() == x.dim() - 1, "it is not over the last axis")


def _rms_norm(call: Call) -> Translated:
    x = call.tensor(0)
    _over_last(call, x)
    return rms_norm(x, call.tensor(1), call.real("epsilon", 1e-5))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def _layer_norm(call: Call) -> Translated:
    x = call.tensor(0)
    _over_last(call, x)
    return _layer_normed(x, call.tensor(1), call.optional(2), call), None, None


def _layer_normed(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, call.real("epsilon", 1e-5))


def _with_residual(norm: Callable[[Call, Tensor], Tensor], bias: int) -> Callable[[Call], Translated]:
    """bias: which input is added to the sum, too."""

    def translate(call: Call) -> Translated:
        total = call.tensor(0) + call.tensor(1)
        added = call.optional(bias)
        total = total if added is None else total + added
        return norm(call, total), None, None, total

    return translate


def _summed_rms(call: Call, total: Tensor) -> Tensor:
    return rms_norm(total, call.tensor(2), call.real("epsilon", 1e-5))


def _summed_layer(call: Call, total: Tensor) -> Tensor:
    return _layer_normed(total, call.tensor(2), call.optional(3), call)


NORMS: Mapping[tuple[str, str], Callable[[Call], Translated]] = MappingProxyType(
    {
        ("", "RMSNormalization"): _rms_norm,
        ("", "SimplifiedLayerNormalization"): _rms_norm,
        ("", "LayerNormalization"): _layer_norm,
        (_MICROSOFT, "SkipSimplifiedLayerNormalization"): _with_residual(_summed_rms, 3),
        (_MICROSOFT, "SkipLayerNormalization"): _with_residual(_summed_layer, 4),
    }
)
