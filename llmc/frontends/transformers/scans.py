"""Convolutions and scans of transformers' recurrent models as llmc:: ops, while such a model is captured, and mixtures
of experts that call no hook.

Their own code for a whole sequence splits it into chunks or walks over its tokens, which fixes the number of tokens.
transformers calls it by the names of functions in a model's module, so that kernel libraries can replace it; this
module does the same. A call that uses more than the arithmetic from a zero state is refused. llmc.ops must have been
imported.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from llmc.errors import CaptureError
from llmc.frontends.transformers import biases as hf_biases
from llmc.frontends.transformers import experts as hf_experts
from llmc.frontends.transformers import indexers as hf_indexers
from llmc.frontends.transformers import recurrences as hf_recurrences
from llmc.frontends.transformers.recurrences import rwkv_linear_attention

_llmc = torch.ops.llmc


@contextmanager
def scans_as_ops(model: nn.Module) -> Iterator[None]:
    """Replace the scan functions in the modules of the model's classes, and the scan methods of the model, by llmc's;
    restore them at the end."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    places = [(module, name) for module in modules for name in _FUNCTIONS if hasattr(module, name)]
    before = [getattr(module, name) for module, name in places]
    methods = [(part, name) for part in model.modules() for kind, name in _METHODS if type(part).__name__ == kind]
    try:
        for part, name in methods:
            setattr(part, name, MethodType(_METHODS[type(part).__name__, name], part))
        for module, name in places:
            setattr(module, name, _FUNCTIONS[name])
        yield
    finally:
        for (module, name), function in zip(places, before, strict=True):
            setattr(module, name, function)
        for part, name in methods:
            vars(part).pop(name, None)


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
) -> Tensor:
    """The causal convolution of Mamba's layers, as llmc::causal_conv.

    hidden_states: [1, channels, T]; weight: [channels, width]. Returns [1, channels, T].
    """
    _refuse("causal_conv1d_fn", options)
    x = hidden_states.squeeze(0).t()
    y: Tensor = _llmc.causal_conv.default(x, weight.t(), bias)
    if activation is not None:
        from transformers.activations import ACT2FN

        y = ACT2FN[activation](y)
    return y.t().unsqueeze(0)


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **options: Any,
) -> Tensor:
    """Mamba's scan, as llmc::selective_scan.

    hidden_states, dt, z: [1, channels, T]; A: [channels, n]; B, C: [1, n, T]. Returns [1, channels, T], fp32.
    """
    _refuse("mamba_selective_scan", {**options, "return_last_state": return_last_state})
    x, dt, B, C = (tensor.squeeze(0).t().float() for tensor in (hidden_states, dt, B, C))
    y: Tensor = _llmc.selective_scan.default(x, _positive(dt, delta_bias, delta_softplus), A.float(), B, C)
    if D is not None:
        y = y + x * D
    if z is not None:
        y = y * silu(z.squeeze(0).t())
    return y.t().unsqueeze(0)


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **options: Any,
) -> Tensor:
    """Mamba 2's scan, as llmc::linear_attention.

    hidden_states: [1, T, heads, head_dim]; dt: [1, T, heads]; A: [heads]; B, C: [1, T, groups, n]. Returns
    [1, T, heads, head_dim], fp32.
    """
    states = {"initial_states": initial_states, "return_final_states": return_final_states}
    _refuse("mamba2_chunk_scan", {**options, **states})
    x, dt, B, C = (tensor.squeeze(0).float() for tensor in (hidden_states, dt, B, C))
    dt = _positive(dt, dt_bias, dt_softplus)
    low, high = dt_limit
    if high != float("inf") or low > 0.0 or not dt_softplus:
        dt = dt.clamp(low, high)
    y: Tensor = _llmc.linear_attention.default(C, B, x * dt.unsqueeze(-1), dt * A.float())
    if D is not None:
        y = y + x * D.unsqueeze(-1)
    return y.unsqueeze(0)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule, as llmc::linear_attention.

    query, key: [1, T, groups, key_dim]; value: [1, T, heads, value_dim]; g: [1, T, heads], of Kimi's [1, T, heads,
    key_dim]; beta: [1, T, heads]. Returns [1, T, heads, value_dim] in query's dtype.
    """
    states = {"initial_state": initial_state, "output_final_state": output_final_state}
    _refuse("chunk_gated_delta_rule", {**options, **states})
    q, k, v, decay, betas = (tensor.squeeze(0).float() for tensor in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + 1e-6) for tensor in (q, k))
    y: Tensor = _llmc.linear_attention.default(q * q.shape[-1] ** -0.5, k, v, decay, betas)
    return y.to(query.dtype).unsqueeze(0), None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "mamba_selective_scan": mamba_selective_scan,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_gated_delta_rule,
    "rwkv_linear_attention": rwkv_linear_attention,
}
_METHODS = {**hf_recurrences.METHODS, **hf_biases.METHODS, **hf_experts.METHODS, **hf_indexers.METHODS}


def _positive(dt: Tensor, bias: Tensor | None, is_softplus: bool) -> Tensor:
    biased = dt if bias is None else dt + bias.float()
    return softplus(biased) if is_softplus else biased


# Arguments of models that do not affect the arithmetic.
_INERT = frozenset(
    {
        *("position_ids", "position_embeddings", "cache_position", "use_cache"),
        *("output_hidden_states", "output_attentions", "z"),
    }
)


def _refuse(function: str, options: dict[str, Any]) -> None:
    set_options = sorted(name for name, value in options.items() if value is not None and value is not False)
    unknown = [name for name in set_options if name not in _INERT]
    if unknown:
        raise CaptureError(
            f"the model's {function} is given {', '.join(unknown)}, which llmc's op of it does not know",
            fix="report the model; states with this option are not supported",
        )
