"""Rotary frequencies: metadata and tensors of factors, converted to transformers' rope_parameters."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import CheckpointError
from llmc.frontends.gguf.container import GgufModel, read_bytes
from llmc.frontends.gguf.description import Sizes, decoder_config

FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# Tensors that are read here and are not tensors of the model.
READ_APART = (FACTORS, LONG, SHORT)
_TYPES = ("none", "linear", "yarn", "longrope")
# Llama 3's own; its converter writes factors, and not what they came from.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_TOLERANCE = 1e-4


def rope_parameters(model: GgufModel, sizes: Sizes, dimensions: int | None = None) -> dict[str, Any]:
    """rope_theta, rope_type and the parameters of that type. dimensions: number of channels of a head that are rotated;
    None for all.

    Raises CheckpointError for a scaling that llmc's engines do not compute.
    """
    hyper, rotated = sizes.hyper, sizes.head_dim if dimensions is None else dimensions
    stated = hyper.whole("rope.dimension_count", default=rotated)
    if stated != rotated:
        raise hyper.error("rope.dimension_count", stated, f"{rotated}, all that a head has")
    theta = hyper.number("rope.freq_base", default=10000.0)
    scaling = hyper.text("rope.scaling.type", default="none")
    if scaling not in _TYPES:
        raise hyper.error("rope.scaling.type", scaling, f"one of {', '.join(_TYPES)}")
    if LONG in model.tensors or SHORT in model.tensors:
        return {"rope_theta": theta, **_longrope(model, sizes, rotated)}
    if scaling == "longrope":
        raise hyper.error("rope.scaling.type", scaling, f"that of a file without {LONG}")
    if FACTORS in model.tensors:
        return {"rope_theta": theta, **_llama3(model, theta, rotated)}
    factor = hyper.number("rope.scaling.factor", default=hyper.number("rope.scale_linear", default=1.0))
    if scaling == "none" and factor != 1.0:
        scaling = "linear"
    if scaling == "none" or factor in (0.0, 1.0):
        return {"rope_theta": theta, "rope_type": "default"}
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": scaling, "factor": factor}
    if scaling == "yarn":
        parameters["original_max_position_embeddings"] = hyper.whole("rope.scaling.original_context_length")
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if hyper.has(f"rope.scaling.{key}"):
                parameters[name] = hyper.number(f"rope.scaling.{key}")
    return parameters


def rotary_config(
    model: GgufModel, sizes: Sizes, model_type: str, class_name: str, rotated: int | None = None
) -> dict[str, Any]:
    """The common part of the configs of decoders with RMS norms and rotary positions. rotated: rotated channels of a
    head."""
    return {
        **decoder_config(model, sizes, model_type, class_name),
        "rms_norm_eps": sizes.hyper.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(model, sizes, rotated),
    }


def _longrope(model: GgufModel, sizes: Sizes, rotated: int) -> dict[str, Any]:
    """Return both sets of factors, and the length for which the short one is used."""
    hyper = sizes.hyper
    original = hyper.whole("rope.scaling.original_context_length", default=sizes.positions)
    parameters: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _numbers(model, SHORT, rotated).tolist(),
        "long_factor": _numbers(model, LONG, rotated).tolist(),
        "original_max_position_embeddings": original,
        "factor": sizes.positions / max(original, 1),
    }
    if hyper.has("rope.scaling.attn_factor"):
        parameters["attention_factor"] = hyper.number("rope.scaling.attn_factor")
    return parameters


def _numbers(model: GgufModel, name: str, rotated: int) -> npt.NDArray[np.float64]:
    """Return one number per frequency."""
    tensor = model.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or tensor.shape != (rotated // 2,):
        seen = "missing" if tensor is None else f"{tensor.type.name} {list(tensor.shape)}"
        raise CheckpointError(
            f"{name} is {seen}, not F32 {[rotated // 2]}",
            at=model.path if tensor is None else tensor.file,
            fix="convert the model again",
        )
    return np.frombuffer(read_bytes(tensor), "<f4").astype(np.float64)


def _llama3(model: GgufModel, theta: float, rotated: int) -> dict[str, Any]:
    """The settings that Llama 3's factors were made from: its own, or those that two factors in between tell."""
    factors = _numbers(model, FACTORS, rotated)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    factor = float(factors.max(initial=1.0)) if np.isfinite(factors).all() else math.nan
    for low, high, original in ((_LOW, _HIGH, float(_ORIGINAL)), *_solved(factors, wavelengths, factor)):
        if np.allclose(_factors(wavelengths, factor, low, high, original), factors, rtol=_TOLERANCE, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": round(original),
            }
    raise CheckpointError(
        f"the factors in {FACTORS} are not those of llama3's scaling: {factors[:4].tolist()} …",
        at=model.tensors[FACTORS].file,
        fix="build from the safetensors checkpoint that the file was converted from",
    )


def _factors(
    wavelengths: npt.NDArray[np.float64], factor: float, low: float, high: float, original: float
) -> npt.NDArray[np.float64]:
    """The divisors of the frequencies. Source: llama.cpp's converter, after Meta's reference for Llama 3.1."""
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors


def _solved(
    factors: npt.NDArray[np.float64], wavelengths: npt.NDArray[np.float64], factor: float
) -> tuple[tuple[float, float, float], ...]:
    """Solve for low, high and the original length from the factors between 1 and the largest, with low at 1."""
    between = np.flatnonzero((factors > 1.0 + _TOLERANCE) & (factors < factor * (1.0 - _TOLERANCE)))
    if len(between) < 2 or not math.isfinite(factor):
        return ()
    smooth = (1.0 / factors[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, offset = np.polyfit(1.0 / wavelengths[between], smooth, 1)
    if not (slope > 0 > offset):
        return ()
    # smooth = (original / wavelength - low) / (high - low)
    high = _LOW - _LOW / offset
    return ((_LOW, float(round(high, 4)), float(round(slope * (high - _LOW)))),)
