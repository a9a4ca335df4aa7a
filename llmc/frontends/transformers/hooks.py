"""The attention and mask functions "llmc" that transformers models call while they are captured.

The attention hook emits one llmc::attention, which is causal by itself; the mask hook returns no mask where that is
all it says, so that no mask arithmetic remains in the graph. They refuse what the ops do not say, since dropping it
would change the results. llmc.ops must have been imported.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from llmc.errors import CaptureError
from llmc.frontends.tracing.trace import EXAMPLE_TOKENS
from llmc.frontends.transformers.indexers import CHOSEN

IMPLEMENTATION = "llmc"
# Model classes that return a row per text: their tokens may also see later ones.
BOTH_WAYS = "llmc_both_ways"

# Arguments of models that do not affect attention at inference.
_INERT = frozenset(
    {
        "cache_position",
        "dropout",
        "head_mask",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def implementation_for(model_class: type, *, both_ways: bool = False) -> str:
    """The attention implementation to capture a model with; it is made known to transformers if it is one of llmc's.

    Models with their own attention code (BLOOM, Falcon) never call the hook but would get no mask from it: they are
    captured "eager", with their masks, as plain modules are.
    """
    if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return "eager"
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention_hook)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_hook)
    AttentionInterface.register(BOTH_WAYS, both_ways_attention_hook)
    AttentionMaskInterface.register(BOTH_WAYS, both_ways_mask_hook)
    return BOTH_WAYS if both_ways else IMPLEMENTATION


def attention_hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, captured as llmc::attention.

    query: [1, heads, T, head_dim], key and value: [1, kv_heads, T, head_dim]; returns [1, T, heads, head_dim].

    s_aux: [heads]; sinks: [1, heads, T, 1]. position_bias: [1, heads, T, extent], of the keys 0, 1, … positions back.
    indices: [1, T, chosen], of the keys that an indexer lets each query see: llmc's own, or all keys, or it is refused.
    Masks that say more than a window or chunks are refused here, where they are used: some models make masks for
    encoders that they do not have.
    """
    layer = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal and getattr(attention_mask, _KINDS, None) is None:
        raise CaptureError(f"{layer} is not causal", fix="only decoder models with causal attention are supported")
    # Models pass through whatever their forward was given; only what has a value and a meaning here can be refused.
    unknown = sorted(name for name, option in options.items() if option is not None and name not in _INERT)
    if unknown:
        raise CaptureError(
            f"{layer} passes {', '.join(unknown)} to the attention, which llmc::attention does not know",
            fix="report the model; attention with this option is not supported",
        )
    if indices is not None and not hasattr(indices, CHOSEN):
        _check_all_seen(module, indices, key.shape[2], layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if attention_mask is not None and not hasattr(attention_mask, _BOUNDS):
        raise _mask_of_its_own(attention_mask, layer)
    bounds: _Bounds = getattr(attention_mask, _BOUNDS, _Bounds())
    window = bounds.window or sliding_window
    q, k, v = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    bias = None if position_bias is None else _by_distance(position_bias, layer)
    if sinks is not None:
        s_aux = sinks.squeeze(-1).squeeze(0).t()
    chosen = indices.squeeze(0) if indices is not None and hasattr(indices, CHOSEN) else None
    out = torch.ops.llmc.attention.default(
        q, k, v, scale, window, softcap, s_aux, chunk=bounds.chunk, bias=bias, chosen=chosen
    )
    return out.unsqueeze(0), None


def _mask_of_its_own(mask: Tensor, layer: str) -> CaptureError:
    unknown = sorted(getattr(mask, _KINDS, ()))
    return CaptureError(
        f"{layer} masks its attention by {', '.join(unknown)}, which llmc::attention cannot express"
        if unknown
        else f"{layer} passes its own mask to the attention, which llmc cannot express",
        fix="only causal attention, with or without a sliding window or chunks, is supported",
    )


def _by_distance(position_bias: Tensor, layer: str) -> Tensor:
    """[T, heads, extent], for a bias with a fixed number of entries per query instead of one per key."""
    if not isinstance(position_bias.shape[-1], int):
        raise CaptureError(
            f"{layer} adds a bias of each query and key to its scores, which llmc::attention does not know",
            fix="report the model; biases by distance that follow from the query are supported, and ALiBi",
        )
    return position_bias.squeeze(0).transpose(0, 1)


def _check_all_seen(module: Any, indices: Tensor, tokens: int | torch.SymInt, layer: str) -> None:
    """Check that an indexer chooses all keys. This holds up to its number of chosen keys, which then bounds the model's
    length."""
    most = getattr(module.config, "index_topk", None)
    chosen = indices.shape[-1]
    if isinstance(most, int) and most > EXAMPLE_TOKENS and statically_known_true(chosen == torch.sym_min(most, tokens)):
        torch._check(tokens <= most)
    elif not statically_known_true(chosen == tokens):
        raise CaptureError(
            f"{layer} lets each query see {most} keys, which its indexer chooses",
            fix="llmc::attention sees all keys: such a model compiles only if it chooses more than "
            f"{EXAMPLE_TOKENS} keys, for contexts up to that number of tokens",
        )


def both_ways_attention_hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a model whose masks may let all tokens see each other; other masks go to `attention_hook`."""
    bounds: _Bounds | None = getattr(attention_mask, _BOUNDS, None)
    if bounds is None or not bounds.both_ways:
        return attention_hook(module, query, key, value, attention_mask, scaling, softcap=softcap, **options)
    known = _INERT | {"sliding_window", "is_causal", "deterministic"}
    unknown = sorted(name for name, option in options.items() if option is not None and name not in known)
    if unknown or key.shape[-2] != query.shape[-2]:
        raise CaptureError(
            f"{type(module).__name__} passes {', '.join(unknown) or 'keys of other tokens'} to its attention, which "
            "llmc::bidirectional_attention does not know",
            fix="report the model; attention with this option is not supported",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    out = torch.ops.llmc.bidirectional_attention.default(q, k, v, scale, bounds.window, softcap)
    return out.unsqueeze(0), None


def both_ways_mask_hook(mask_function: Callable[..., Any], **sizes: Any) -> Tensor | None:
    """The mask of a bidirectional layer, as a record of its bounds: none, or a window. See `mask_hook` for others."""
    kinds = _kinds(mask_function)
    if not kinds <= {_BIDIRECTIONAL, _BIDIRECTIONAL_SLIDING, "packed_sequence_mask_function"}:
        return mask_hook(mask_function, **sizes)
    distance = _width(mask_function, _BIDIRECTIONAL_SLIDING)
    mask = torch.zeros(())
    setattr(mask, _BOUNDS, _Bounds(None if distance is None else distance + 1, both_ways=True))
    return mask


def mask_hook(mask_function: Callable[..., Any], **sizes: Any) -> Tensor | None:
    """Return None for a causal mask, because llmc::attention is causal, and transformers' own mask otherwise.

    Such a mask has a record of its bounds, because some models state their window only in the mask.
    """
    kinds = _kinds(mask_function)
    # An indexer chooses among the keys that the mask lets a query see: it reads the mask itself.
    has_indexer = getattr(sizes.get("config"), "index_topk", None) is not None
    if kinds <= _CAUSAL and not has_indexer:
        return None
    from transformers.masking_utils import eager_mask

    mask: Tensor = eager_mask(mask_function=mask_function, **sizes)
    if kinds <= _CAUSAL | {_SLIDING, _CHUNKED}:
        setattr(mask, _BOUNDS, _Bounds(_width(mask_function, _SLIDING), _width(mask_function, _CHUNKED)))
    else:
        setattr(mask, _KINDS, frozenset(kinds - _CAUSAL - {_SLIDING, _CHUNKED}))
    return mask


# Masks are closures over other masks, known by where in transformers.masking_utils they were made. Packing keeps
# sequences apart that lie in one row; a captured row is one sequence.
_COMBINED = frozenset(
    {
        "and_masks.<locals>.and_mask",
        "add_offsets_to_mask_function.<locals>.inner_mask",
        "remap_positions_for_packed_sequence.<locals>.inner_mask",
    }
)
_CAUSAL = frozenset({"causal_mask_function", "packed_sequence_mask_function"})
_SLIDING, _CHUNKED = "sliding_window_overlay", "chunked_overlay"
_BIDIRECTIONAL = "bidirectional_mask_function"
_BIDIRECTIONAL_SLIDING = "sliding_window_bidirectional_overlay"


@dataclass(frozen=True)
class _Bounds:
    """The bounds of a causal or bidirectional mask, in the form of llmc's attention ops."""

    window: int | None = None
    chunk: int | None = None
    both_ways: bool = False


# The attribute of a mask that says which positions a query sees.
_BOUNDS = "llmc_bounds"
# The error for a mask that llmc::attention cannot express, naming the kinds of keys that it hides.
_KINDS = "llmc_kinds"


def _kinds(mask_function: Callable[..., Any]) -> set[str]:
    """The elementary masks that a mask function is the intersection of."""
    return {part.__qualname__.removesuffix(".<locals>.inner_mask") for part in _elementary(mask_function)}


def _width(mask_function: Callable[..., Any], kind: str) -> int | None:
    """The width of the narrowest window or chunk in it."""
    parts = [part for part in _elementary(mask_function) if part.__qualname__.startswith(kind)]
    closures = [cell.cell_contents for part in parts for cell in part.__closure__ or ()]
    return min((width for width in closures if isinstance(width, int)), default=None)


def _elementary(mask_function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if mask_function.__qualname__ not in _COMBINED:
        yield mask_function
        return
    for cell in mask_function.__closure__ or ():
        inner = cell.cell_contents
        for part in inner if isinstance(inner, tuple | list) else (inner,):
            if callable(part) and hasattr(part, "__qualname__"):
                yield from _elementary(part)
