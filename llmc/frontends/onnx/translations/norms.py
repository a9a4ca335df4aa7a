"""Norms, alone and with the residual sum before them."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from llmc.frontends.onnx.call import Call, Translated, Translations

_MICROSOFT = "com.microsoft"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last axis."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def _rms(call: Call, x: Tensor, weight: int) -> Tensor:
    """weight: which input is the weight."""
    return rms_norm(x, call.tensor(weight), call.real("epsilon", 1e-5))


def _layer(call: Call, x: Tensor, weight: int) -> Tensor:
    """The same; the bias comes after the weight."""
    scales = call.tensor(weight)
    return functional.layer_norm(x, scales.shape, scales, call.optional(weight + 1), call.real("epsilon", 1e-5))


def _alone(norm: Callable[[Call, Tensor, int], Tensor]) -> Callable[[Call], Translated]:
    def translate(call: Call) -> Translated:
        x = call.tensor(0)
        call.unless(call.integer("axis", -1) % x.dim() == x.dim() - 1, "it is not over the last axis")
        return norm(call, x, 1), None, None

    return translate


def _with_residual(norm: Callable[[Call, Tensor, int], Tensor], bias: int) -> Callable[[Call], Translated]:
    """bias: the index of the input that is also added to the sum."""

    def translate(call: Call) -> Translated:
        total = call.tensor(0) + call.tensor(1)
        added = call.optional(bias)
        total = total if added is None else total + added
        return norm(call, total, 2), None, None, total

    return translate


NORMS: Translations = {
    ("", "RMSNormalization"): _alone(_rms),
    ("", "SimplifiedLayerNormalization"): _alone(_rms),
    ("", "LayerNormalization"): _alone(_layer),
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): _with_residual(_rms, 3),
    (_MICROSOFT, "SkipLayerNormalization"): _with_residual(_layer, 4),
}
