"""Quantized checkpoints of a tiny Llama, written in the public formats by code that shares nothing with the reader.

GPTQ and AWQ are packed bit by bit, after the loops of AutoGPTQ and AutoAWQ; compressed-tensors by its
own library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# A weight [out, in] → its tensors by suffix, and what they stand for.
Writer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def tiny_llama(seed: int = 0) -> Any:
    """Two layers of 64 channels whose columns groups of 32 divide; weights spread enough that rounding shows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    return model


def write_quantized(directory: Path, model: Any, config: dict[str, Any], writer: Writer) -> dict[str, Tensor]:
    """Save a model with every linear but the head quantized; the dequantized weights by name."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in _LINEARS:
            tensors[name] = tensor
            continue
        parts, dequantized[name] = writer(module, tensor.float())
        tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return dequantized


def gptq_writer(*, symmetric: bool, act_order: bool, stored_offset: int, bits: int = 4) -> Writer:
    """stored_offset: 1 writes zeros less one, as checkpoint_format gptq does, 0 as gptq_v2."""

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        columns = weight.shape[1]
        groups = torch.arange(columns) // GROUP
        if act_order:
            # All products of one input are taken in the same order.
            seed = sum(map(ord, module.rpartition(".")[0])) if "proj" in module else 0
            shuffled = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
            groups = torch.empty_like(groups)
            groups[shuffled] = torch.arange(columns) // GROUP
        codes, scales, zeros = _rounded(weight, groups, bits, symmetric)
        return {
            "qweight": _pack_down(codes.T, bits),
            "qzeros": _pack_down(zeros - stored_offset, bits).T,
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": groups.int(),
        }, _values(codes, scales, zeros, groups.numpy())

    return write


def awq_writer(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The gemm version: eight output columns a word, in AWQ's order."""
    groups = torch.arange(weight.shape[1]) // GROUP
    codes, scales, zeros = _rounded(weight, groups, 4, symmetric=False)
    return {
        "qweight": _pack_awq(codes.T),
        "qzeros": _pack_awq(zeros.T),
        "scales": torch.from_numpy(scales.T.copy()),
    }, _values(codes, scales, zeros, groups.numpy())


def compressed_writer(config: dict[str, Any], format: str) -> Writer:
    """compressed-tensors' own compressor. config: of one config group."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=config["weights"])
    compressor = BaseCompressor.get_value_from_registry(format)

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        strategy, group = config["weights"]["strategy"], config["weights"].get("group_size")
        grouped = {
            "tensor": weight.reshape(1, -1),
            "channel": weight[:, None],
            "group": weight.reshape(len(weight), -1, group or 1),
        }[strategy]
        low, high = grouped.amin(-1), grouped.amax(-1)
        scale, zero = calculate_qparams(low, high, scheme.weights)
        state = {"weight": weight, "weight_scale": scale}
        if not config["weights"].get("symmetric", True):
            state["weight_zero_point"] = zero
        compressed = compressor.compress(state, scheme)
        dequantized = compressor.decompress(dict(compressed), scheme)["weight"]
        if (config.get("input_activations") or {}).get("dynamic") is False:
            compressed["input_scale"] = torch.tensor([0.05])
        return compressed, dequantized.float()

    return write


def fp4_writer(config: dict[str, Any], format: str) -> Writer:
    """compressed-tensors' own compressor of e2m1, with scales found here; values in fp32, which it rounds."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=config["weights"])
    compressor = BaseCompressor.get_value_from_registry(format)
    group = config["weights"]["group_size"]

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.reshape(len(weight), -1, group).abs().amax(-1)
        state = {"weight": weight}
        if format.startswith("mx"):
            scale = state["weight_scale"] = torch.exp2(torch.floor(torch.log2(largest)) - 2)
        else:
            state["weight_global_scale"] = 448 * 6 / largest.max().reshape(1)
            state["weight_scale"] = (largest / 6 * state["weight_global_scale"]).to(torch.float8_e4m3fn)
            scale = state["weight_scale"].float() / state["weight_global_scale"]
            state["weight_scale"] = state["weight_scale"].float()
        compressed = compressor.compress(state, scheme)
        numbers = unpack_fp4_from_uint8(compressed["weight_packed"], *weight.shape, torch.float32)
        return compressed, numbers * scale.repeat_interleave(group, 1)

    return write


def by_module(writers: dict[str, Writer]) -> Writer:
    """The writer whose name ends the module's."""
    return lambda module, weight: next(w for end, w in writers.items() if module.endswith(end))(module, weight)


def _rounded(
    weight: Tensor, groups: Tensor, bits: int, symmetric: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Unsigned codes [out, in], fp16 scales and zeros [out, groups]."""
    values, of = weight.numpy(), groups.numpy()
    count, top = of.max() + 1, 2**bits - 1
    scales = np.zeros((len(values), count), np.float16)
    zeros = np.zeros((len(values), count), np.int64)
    codes = np.zeros(values.shape, np.int64)
    for group in range(count):
        part = values[:, of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales[:, group] = (high - low) / top
        zero = np.full(len(part), 2 ** (bits - 1)) if symmetric else np.round(-low / scales[:, group])
        zeros[:, group] = np.clip(zero, 1, top)
        wide = scales[:, group, None].astype(np.float32)
        codes[:, of == group] = np.clip(np.round(part / wide) + zeros[:, group, None], 0, top)
    return codes, scales, zeros


def _values(
    codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], zeros: np.ndarray[Any, Any], groups: np.ndarray[Any, Any]
) -> Tensor:
    found = np.zeros(codes.shape, np.float32)
    for column, group in enumerate(groups):
        found[:, column] = (codes[:, column] - zeros[:, group]) * scales[:, group].astype(np.float32)
    return torch.from_numpy(found)


def _pack_down(codes: np.ndarray[Any, Any], bits: int) -> Tensor:
    """Rows in words of 32 bits, the first lowest."""
    per_word = 32 // bits
    packed = np.zeros((codes.shape[0] // per_word, codes.shape[1]), np.uint32)
    for row in range(codes.shape[0]):
        field = (codes[row] & (2**bits - 1)).astype(np.uint32)
        packed[row // per_word] |= field << np.uint32(bits * (row % per_word))
    return torch.from_numpy(packed.astype(np.int32))


def _pack_awq(codes: np.ndarray[Any, Any]) -> Tensor:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for word in range(packed.shape[1]):
        for nibble in range(8):
            packed[:, word] |= codes[:, word * 8 + order[nibble]].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(packed.astype(np.int32))
