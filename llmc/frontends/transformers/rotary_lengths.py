"""Rotary frequencies that follow the length of a sequence: the set that an engine computes with.

Keys stay in the KV cache as they were turned, so an engine has one set of frequencies. longrope has short factors up to
the original length and long ones beyond: the longest sequence that the engine is built for decides, as in vLLM and
llama.cpp. dynamic leaves the frequencies as they are up to max_position_embeddings, and no engine goes beyond.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CaptureError, CheckpointError

_LONGROPE, _DYNAMIC = "longrope", "dynamic"


def hold_frequencies(model: nn.Module, config: Any, longest: int | None, at: str | Path) -> tuple[str, ...]:
    """Give a transformers model the one set of rotary frequencies that sequences up to `longest` tokens have.

    Args:
        model: made of `config`, with its buffers computed; its rotary modules are changed in place.
        longest: None for the model's own limit.
        at: the place of the config, for errors.

    Returns:
        Notes for a build to print.

    Raises:
        CheckpointError: factors that make no frequencies.
        CaptureError: rotary modules that do not take their frequencies from transformers.
    """
    wanted = {_LONGROPE, _DYNAMIC}.intersection(settings.get("rope_type", "") for _, settings in _settings(config))
    if not wanted:
        return ()
    longest = longest or config.max_position_embeddings
    notes: dict[str, None] = {}
    held = set[str]()
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer_type, name in types.items() if isinstance(types, dict) else ((None, types),):
            if name not in wanted or not hasattr(module, _named("original_inv_freq", layer_type)):
                continue
            held.add(name)
            if name == _LONGROPE:
                settings = dict(_settings(module.config))[layer_type]
                _hold(module, layer_type, *_longrope(module, settings, layer_type, longest, at))
                notes |= dict.fromkeys(_note(settings, longest))
            else:
                inv_freq: Tensor = getattr(module, _named("original_inv_freq", layer_type))
                _hold(module, layer_type, inv_freq, getattr(module, _named("attention_scaling", layer_type)))
    for name in sorted(wanted - held):
        raise CaptureError(
            f"rope_type {name!r} is not supported for {config.model_type!r}: its frequencies change with the length of "
            "the sequence, and keys that are in the KV cache cannot follow",
            at=at,
            fix="pass the model as an nn.Module whose rotary frequencies are those of one length",
        )
    return tuple(notes)


def _settings(config: Any) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Rotary settings, one for all layers (of None) or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_type = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    yield from by_type.items() if by_type else ((None, parameters),)


def _longrope(
    module: Any, settings: dict[str, Any], layer_type: str | None, longest: int, at: str | Path
) -> tuple[Tensor, float]:
    """Frequencies and the factor of cosines and sines, for that length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = "long" if _is_long(settings, longest) else "short"
    by_type = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[_LONGROPE](module.config, None, seq_len=longest, **by_type)
    # Phi 3.5 MoE has its own factor for each set.
    scaling = float(settings.get(f"{kind}_mscale", scaling))
    usual, factors = getattr(module, _named("original_inv_freq", layer_type)), settings[f"{kind}_factor"]
    if len(factors) != len(usual) or not (torch.isfinite(inv_freq).all() and (inv_freq > 0).all() and scaling > 0):
        raise CheckpointError(
            f"{kind}_factor has {len(factors)} values, {min(factors)} to {max(factors)}, and cosines are multiplied "
            f"by {scaling}; the model has {len(usual)} frequencies",
            at=at,
            fix=f"correct {kind}_factor in rope_parameters: one positive number for each frequency",
        )
    return inv_freq, scaling


def _is_long(settings: dict[str, Any], longest: int) -> bool:
    return bool(longest > settings["original_max_position_embeddings"])


def _note(settings: dict[str, Any], longest: int) -> tuple[str, ...]:
    original = settings["original_max_position_embeddings"]
    if not _is_long(settings, longest) or settings["short_factor"] == settings["long_factor"]:
        return ()
    return (
        f"longrope: the engine is for sequences of up to {longest} tokens and has the long factors, in short texts "
        f"too; the short ones, which the model has up to {original} tokens, are those of --max-model-len {original}",
    )


def _hold(module: Any, layer_type: str | None, inv_freq: Tensor, scaling: float) -> None:
    """Make these a rotary module's frequencies at every length."""
    setattr(module, _named("inv_freq", layer_type), inv_freq)
    setattr(module, _named("original_inv_freq", layer_type), inv_freq.clone())
    setattr(module, _named("attention_scaling", layer_type), scaling)
    config = copy.copy(module.config)
    if layer_type is None:
        module.rope_type = "default"
        config.rope_parameters = {**config.rope_parameters, "rope_type": "default"}
        # Some models compute them again at every call.
        module.rope_init_fn = lambda *given, **named: (inv_freq, scaling)
    else:
        module.rope_type = {**module.rope_type, layer_type: "default"}
        of_type = {**config.rope_parameters[layer_type], "rope_type": "default"}
        config.rope_parameters = {**config.rope_parameters, layer_type: of_type}
    module.config = config


def _named(attribute: str, layer_type: str | None) -> str:
    return attribute if layer_type is None else f"{layer_type}_{attribute}"
