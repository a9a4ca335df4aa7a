"""Quantized checkpoints of a tiny Llama, written in the public formats by code that shares nothing with the reader.

GPTQ and AWQ are packed bit by bit, after the loops of AutoGPTQ and AutoAWQ; compressed-tensors by its own library;
others by what their documentation says that a number is.
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
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # DeepSeek's attention

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


def write_quantized(
    directory: Path, model: Any, config: dict[str, Any], writer: Writer, *, file_name: str = "config.json"
) -> dict[str, Tensor]:
    """Save a model with every linear but the head quantized; the dequantized weights by name. file_name: another one
    than config.json holds the quantization's config itself."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in (*_LINEARS, *_LATENT):
            tensors[name] = tensor
            continue
        parts, dequantized[name] = writer(module, tensor.float())
        tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    if file_name == "config.json":
        config = json.loads((directory / file_name).read_text()) | {"quantization_config": config}
    (directory / file_name).write_text(json.dumps(config))
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


def awq_writer(module: str, weight: Tensor, *, symmetric: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """The gemm version: eight output columns a word, in AWQ's order."""
    groups = torch.arange(weight.shape[1]) // GROUP
    codes, scales, zeros = _rounded(weight, groups, 4, symmetric=symmetric)
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


def float8_writer(
    block: tuple[int, int] | None, suffix: str = "weight_scale", *, exponents: bool = False, axes: int = 2
) -> Writer:
    """e4m3 with a scale for each block, or for the tensor. exponents: scales that are powers of two, as a byte each.
    axes: 4 puts an axis of one behind each of the blocks' two, as ModelOpt does."""

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        height, width = block or (rows, columns)
        scales = torch.empty(-(-rows // height), -(-columns // width))
        codes, values = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                part = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                largest = float(weight[part].abs().max()) / 448
                scales[i, j] = 2.0 ** np.ceil(np.log2(largest)) if exponents else largest
                codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
                values[part] = codes[part].float() * scales[i, j]
        stored = (torch.log2(scales) + 127).to(torch.uint8) if exponents else scales
        stored = stored[:, None, :, None] if axes == 4 else stored
        return {"weight": codes, suffix: stored if block else stored.reshape(())}, values

    return write


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def modelopt_fp4_writer(group: int) -> Writer:
    """e2m1 in bytes of two, the first of them low. NVFP4 (groups of 16): scales in e4m3, and one that all of them are
    multiplied with; MXFP4 (groups of 32): exponents."""

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.reshape(len(weight), -1, group).abs().amax(-1) / 6
        whole = float(largest.max()) / 448
        stored = (largest / whole).to(torch.float8_e4m3fn)
        scales = stored.float() * whole
        if group == 32:
            exponents = torch.ceil(torch.log2(largest)).clamp(-127, 127)
            stored, scales = (exponents + 127).to(torch.uint8), torch.exp2(exponents)
        wide = scales.repeat_interleave(group, 1)
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        codes = (weight / wide)[..., None].sub(table).abs().argmin(-1)
        packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        parts = {"weight": packed, "weight_scale": stored, "input_scale": torch.tensor(0.02)}
        if group == 16:
            parts["weight_scale_2"] = torch.tensor(whole)
        return parts, table[codes] * wide

    return write


# Dettmers et al. 2023, appendix E: as bitsandbytes writes it beside each weight.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def nf4_writer(block: int, *, nested: bool) -> Writer:
    """bitsandbytes' 4 bits: over the whole weight, the first of two codes in a byte high. nested: blocks' largest
    magnitudes are codes themselves, of a table of 256, in blocks of 4 here, behind an offset."""
    nested_block, offset = 4, 0.04

    def write(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        flat, table = weight.flatten(), torch.tensor(NF4)
        blocks = [flat[start : start + block] for start in range(0, len(flat), block)]
        largest = torch.stack([part.abs().max() for part in blocks])
        parts = {"weight.absmax": largest, "weight.quant_map": table}
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [*weight.shape]}
        if nested:
            map_of_256 = torch.linspace(-1, 1, 256)
            above = [part - offset for part in largest.split(nested_block)]
            of_blocks = torch.stack([part.abs().max() for part in above])
            codes = [(a[:, None] / m - map_of_256).abs().argmin(1) for a, m in zip(above, of_blocks, strict=True)]
            largest = torch.cat([map_of_256[c] * m + offset for c, m in zip(codes, of_blocks, strict=True)])
            parts |= {"weight.absmax": torch.cat(codes).to(torch.uint8), "weight.nested_absmax": of_blocks}
            parts["weight.nested_quant_map"] = map_of_256
            state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": offset}
        scale = torch.cat([m.expand(len(part)) for m, part in zip(largest, blocks, strict=True)])
        chosen = (flat / scale)[:, None].sub(table).abs().argmin(1)
        parts["weight"] = (16 * chosen[::2] + chosen[1::2]).to(torch.uint8)[:, None]
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        return parts, (table[chosen] * scale).view(weight.shape)

    return write


def llm_int8_writer(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """bitsandbytes' 8 bits: SCB holds rows' largest magnitudes, of which a code is a 127th."""
    largest = weight.abs().amax(1)
    codes = torch.round(weight * 127 / largest[:, None]).to(torch.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * largest[:, None] / 127


def int8_rows_writer(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """ModelOpt's int8: a scale a row."""
    scales = weight.abs().amax(1) / 127
    codes = torch.round(weight / scales[:, None]).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales[:, None]


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
    values = np.zeros(codes.shape, np.float32)
    for column, group in enumerate(groups):
        values[:, column] = (codes[:, column] - zeros[:, group]) * scales[:, group].astype(np.float32)
    return torch.from_numpy(values)


def _pack_down(codes: np.ndarray[Any, Any], bits: int) -> Tensor:
    """Rows in words of 32 bits, the first lowest; one of 3 bits may begin in one word and end in the next."""
    packed = np.zeros((codes.shape[0] * bits // 32, codes.shape[1]), np.uint64)
    for row in range(codes.shape[0]):
        field = (codes[row] & (2**bits - 1)).astype(np.uint64)
        word, shift = divmod(bits * row, 32)
        packed[word] |= (field << np.uint64(shift)) & np.uint64(2**32 - 1)
        if shift + bits > 32:
            packed[word + 1] |= field >> np.uint64(32 - shift)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def _pack_awq(codes: np.ndarray[Any, Any]) -> Tensor:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for word in range(packed.shape[1]):
        for nibble in range(8):
            packed[:, word] |= codes[:, word * 8 + order[nibble]].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(packed.astype(np.int32))
