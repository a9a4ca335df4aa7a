"""Checkpoints whose weights are codes: GPTQ, AWQ, compressed-tensors and gpt-oss's MXFP4, as they are on the Hub.

A QuantizedSource shows each quantized weight under the name that the model knows, with its true shape, and beside it
`NAME::codes`, `NAME::scales`, `NAME::zeros` and `NAME::order`, so that codes go into an engine as they are.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.directory_files import read_json
from llmc.frontends.checkpoints.marlin_24 import marlin_24_shape, unpack_marlin_24
from llmc.frontends.checkpoints.quantization_config import (
    EXPERT_BLOCKS,
    MARLIN_24,
    ModuleGroup,
    StoredScheme,
    scheme_of,
    stored_schemes,
)
from llmc.frontends.checkpoints.safetensors import HidingSource, SafetensorsSource, check_shape
from llmc.frontends.checkpoints.safetensors_header import TensorEntry
from llmc.frontends.checkpoints.unpack_codes import (
    are_middle,
    unpack_awq,
    unpack_compressed,
    unpack_fp4,
    unpack_gptq,
)
from llmc.graph.stored_codes import RoundedAgain, StoredWeight, UnpackedCodes

_PARTS = ("codes", "scales", "zeros", "order")


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight as its files hold it. shape: [out, in]. tensors: names in the files by suffix.

    input_scale: the name of the static scale of its activations. experts: of a weight that the model has as
    [experts, in, out / experts]; its rows are those of one expert after the other.
    """

    name: str
    shape: tuple[int, int]
    tensors: dict[str, str]
    scheme: StoredScheme
    input_scale: str | None
    experts: int | None = None

    @property
    def model_shape(self) -> tuple[int, ...]:
        """As the model knows it."""
        rows, columns = self.shape
        return self.shape if self.experts is None else (self.experts, columns, rows // self.experts)

    def as_model_has_it(self, values: Tensor) -> Tensor:
        """values: [out, in]."""
        return values if self.experts is None else values.unflatten(0, (self.experts, -1)).transpose(1, 2)


class QuantizedSource(HidingSource):
    """The tensors of a quantized checkpoint; a CodeSource. Opening reads headers and config.json only.

    Raises CheckpointError for a format that is not known, and for quantized tensors that are not complete.
    """

    def __init__(self, directory: Path) -> None:
        files = SafetensorsSource(directory)
        groups = stored_schemes(read_json(directory / "config.json"), directory / "config.json")
        self._weights = _find_weights(files, groups)
        hidden = {name for weight in self._weights.values() for name in weight.tensors.values()}
        hidden |= {weight.input_scale for weight in self._weights.values() if weight.input_scale is not None}
        super().__init__(files, {name: weight.model_shape for name, weight in self._weights.items()}, hidden)
        # Codes, scales and zeros of one weight are asked for one after the other.
        self.unpacked = functools.lru_cache(maxsize=1)(self._unpack)

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is codes."""
        return bool(self._weights)

    @property
    def gives_way(self) -> bool:
        """False: codes stay as they are, whatever `quantize` says of other weights."""
        return False

    def weight(self, name: str) -> StoredWeight | None:
        """How the weight's codes are stored; None if it is not quantized."""
        found = self._weights.get(name)
        if found is None:
            return None
        scheme = found.scheme
        return StoredWeight(name, found.shape, scheme.method, scheme.format, scheme.activation)

    def rounded(self, name: str) -> RoundedAgain | None:
        """None: all formats that are read are codes."""

    def check(self, name: str, shape: tuple[int, ...], *, floating: bool) -> None:
        weight = self._weights.get(name)
        if weight is None:
            self.files.check(name, shape, floating=floating)
        else:
            check_shape(name, weight.model_shape, shape, self._entry(weight).file)

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU: dequantized to fp32 if it is a quantized weight, or the part of one that is named."""
        base, _, part = name.partition("::")
        if base not in self._weights:
            return self.files.load(name)
        unpacked = self.unpacked(base)
        if not part:
            weight = self._weights[base]
            return weight.as_model_has_it(unpacked.values(weight.scheme.format))
        found: Tensor | None = getattr(unpacked, part) if part in _PARTS else None
        if found is None:
            raise CheckpointError(f"weight {base!r} has no {part}", at=self.directory, fix="compile the model again")
        return found

    def are_alike(self, names: Sequence[str]) -> bool:
        """Whether the weights' codes can be the rows of one matrix: of one scheme and shape, all with zeros or none,
        columns in place, and without scales of activations."""
        weights = [self._weights.get(name) for name in names]
        known = [each for each in weights if each is not None and each.experts is None and each.input_scale is None]
        if len(known) != len(weights) or any(map(self._has_order, known)):
            return False
        return len({(each.scheme, each.shape, self._stored_shapes(each), self._has_zeros(each)) for each in known}) == 1

    def input_scale(self, name: str) -> Tensor | None:
        """The static scale of a weight's activations, [1] in fp32; None if it has none."""
        scale = self._weights[name].input_scale
        return None if scale is None else self.files.load(scale).float().reshape(1)

    def _entry(self, weight: PackedWeight) -> TensorEntry:
        return self.files.entry(next(iter(weight.tensors.values())))

    def _stored_shapes(self, weight: PackedWeight) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((suffix, self.files.shape(name)) for suffix, name in sorted(weight.tensors.items()))

    def _has_zeros(self, weight: PackedWeight) -> bool:
        suffix = next((each for each in ("qzeros", "weight_zero_point") if each in weight.tensors), None)
        if suffix is None:
            return False
        stored, bits = self.files.load(weight.tensors[suffix]), weight.scheme.bits
        return not are_middle(stored, bits if stored.dtype is torch.int32 else None, weight.scheme.zero_offset)

    def _has_order(self, weight: PackedWeight) -> bool:
        suffix = next((each for each in ("g_idx", "weight_g_idx") if each in weight.tensors), None)
        return suffix is not None and bool((self.files.load(weight.tensors[suffix]).diff() < 0).any())

    def _unpack(self, name: str) -> UnpackedCodes:
        """All parts of a quantized weight."""
        weight = self._weights[name]
        part = {suffix: self.files.load(stored) for suffix, stored in weight.tensors.items()}
        scheme = weight.scheme
        try:
            if scheme.method == "gptq":
                group = weight.shape[1] // part["scales"].shape[0]
                stored = (part["qweight"], part["qzeros"], part["scales"], part.get("g_idx"))
                return unpack_gptq(*stored, scheme.bits, group, scheme.zero_offset)
            if scheme.method == "awq":
                return unpack_awq(part["qweight"], part.get("qzeros"), part["scales"])
            if scheme.required == EXPERT_BLOCKS:
                blocks, scales = (part[suffix].reshape(weight.shape[0], -1) for suffix in EXPERT_BLOCKS)
                return unpack_fp4(blocks, scales, None)
            if scheme.format == "mxfp4":
                return unpack_fp4(part["weight_packed"], part["weight_scale"], part.get("weight_global_scale"))
            if scheme.required == MARLIN_24:
                packed, scales, meta = (part[name] for name in MARLIN_24)
                return UnpackedCodes(*unpack_marlin_24(packed, scales, meta, scheme.bits), zeros=None)
            is_packed = "weight_packed" in part
            codes, bits = (part["weight_packed"], scheme.bits) if is_packed else (part["weight"], None)
            scale, zero = part["weight_scale"], part.get("weight_zero_point")
            found = unpack_compressed(codes, scale, zero, weight.shape, bits, scheme.block)
            return _in_group_order(found, part.get("weight_g_idx"))
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the codes of {name!r} do not fit together: {error}",
                at=self._entry(weight).file,
                fix="check that config.json belongs to these weights",
            ) from None


def _in_group_order(found: UnpackedCodes, g_idx: Tensor | None) -> UnpackedCodes:
    """compressed-tensors keeps columns in place and says the group of each: sort them, so that groups are runs."""
    if g_idx is None or bool((g_idx.diff() >= 0).all()):
        return found
    order = torch.argsort(g_idx.long(), stable=True)
    sizes = torch.bincount(g_idx.long(), minlength=found.scales.shape[1])
    if len(sizes) != found.scales.shape[1] or int(sizes.min()) != int(sizes.max()):
        raise ValueError(f"weight_g_idx gives groups {int(sizes.min())} to {int(sizes.max())} columns")
    return replace(found, codes=found.codes[:, order].contiguous(), order=order)


def _find_weights(files: SafetensorsSource, groups: Sequence[ModuleGroup]) -> dict[str, PackedWeight]:
    """Every weight that is quantized. Raises CheckpointError for a checkpoint without any."""
    first = groups[0].scheme
    is_blocks = first.required == EXPERT_BLOCKS
    found = _find_blocks(files, first) if is_blocks else _find_modules(files, groups)
    if not found:
        ending = "_blocks" if is_blocks else f".{first.required[0]}"
        raise CheckpointError(
            f"config.json says that the weights are {first.method}, but no tensor ends in {ending}",
            at=files.directory,
            fix="check that config.json belongs to these weights",
        )
    return found


def _find_modules(files: SafetensorsSource, groups: Sequence[ModuleGroup]) -> dict[str, PackedWeight]:
    """Every module that has quantized tensors. Raises CheckpointError naming the one that lacks some."""
    marks = {suffix for group in groups for suffix in group.scheme.suffixes if suffix != "weight"}
    modules: dict[str, dict[str, str]] = {}
    for name in files.names():
        module, _, suffix = name.rpartition(".")
        if suffix in marks:
            modules.setdefault(module, {})[suffix] = name
    found: dict[str, PackedWeight] = {}
    for module, seen in modules.items():
        scheme = scheme_of(module, groups)
        if scheme is None:
            raise CheckpointError(
                f"{module} has {', '.join(sorted(seen.values()))}, but no config group is for it",
                at=files.directory,
                fix="check that config.json belongs to these weights",
            )
        tensors = {suffix: name for suffix, name in seen.items() if suffix in scheme.suffixes}
        if "weight" in scheme.required and f"{module}.weight" in files.names():
            tensors["weight"] = f"{module}.weight"
        input_scale = tensors.pop("input_scale", None)
        missing = sorted(set(scheme.required) - set(tensors))
        if missing:
            raise CheckpointError(
                f"{module} has {', '.join(sorted(seen.values()))} but no {module}.{missing[0]}",
                at=files.directory,
                fix="download the whole checkpoint again",
            )
        shape = _shape(files, tensors, scheme, module)
        if scheme.block is not None:
            _check_blocks(files, tensors, shape, scheme.block)
        found[f"{module}.weight"] = PackedWeight(f"{module}.weight", shape, tensors, scheme, input_scale)
    _check_unexpected(files, found)
    return found


def _find_blocks(files: SafetensorsSource, scheme: StoredScheme) -> dict[str, PackedWeight]:
    """gpt-oss's matrices of experts: NAME_blocks, uint8 [experts, out, in / 32, 16], and NAME_scales, less the last."""
    found: dict[str, PackedWeight] = {}
    for blocks in files.names():
        name = blocks.removesuffix("_blocks")
        if name == blocks:
            continue
        scales, shape = f"{name}_scales", files.shape(blocks)
        seen = files.shape(scales) if scales in files.names() else None
        if len(shape) != 4 or seen != shape[:3]:
            beside = "is missing" if seen is None else str(list(seen))
            raise CheckpointError(
                f"tensor {blocks!r} has shape {list(shape)} and {scales!r} {beside}, where blocks are [experts, out, "
                "groups, bytes] and scales have all but the last",
                at=files.entry(blocks).file,
                fix="download the whole checkpoint again",
            )
        experts, rows, groups, half = shape
        tensors = {"blocks": blocks, "scales": scales}
        found[name] = PackedWeight(name, (experts * rows, groups * 2 * half), tensors, scheme, None, experts)
    return found


def _shape(files: SafetensorsSource, tensors: dict[str, str], scheme: StoredScheme, module: str) -> tuple[int, int]:
    per_word = 32 // scheme.bits
    if scheme.method in ("gptq", "awq"):
        rows, columns = files.entry(tensors["qweight"]).shape
        return (columns, rows * per_word) if scheme.method == "gptq" else (columns * per_word, rows)
    if scheme.format == "mxfp4":
        rows, halves = files.entry(tensors["weight_packed"]).shape
        return rows, 2 * halves
    if scheme.required == MARLIN_24:
        return marlin_24_shape(files.entry(tensors["weight_packed"]).shape, scheme.bits)
    if "weight_shape" in tensors:
        rows, columns = files.load(tensors["weight_shape"]).tolist()
        return int(rows), int(columns)
    entry = files.entry(tensors["weight"])
    if len(entry.shape) != 2 or entry.dtype not in ("I8", "F8_E4M3"):
        raise CheckpointError(
            f"tensor {module}.weight is {entry.dtype} {list(entry.shape)}, where codes are I8 or F8_E4M3 matrices",
            at=entry.file,
            fix="check that config.json belongs to these weights",
        )
    return entry.shape[0], entry.shape[1]


def _check_blocks(
    files: SafetensorsSource, tensors: dict[str, str], shape: tuple[int, int], block: tuple[int, int]
) -> None:
    """Raise CheckpointError unless there is one scale for each block of a weight."""
    name, expected = tensors["weight_scale"], tuple(-(-side // size) for side, size in zip(shape, block, strict=True))
    entry = files.entry(name)
    if entry.shape != expected:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(entry.shape)}, where blocks of {list(block)} of a weight {list(shape)} "
            f"make it {list(expected)}",
            at=entry.file,
            fix="check that config.json, its block_structure or group_size, belongs to these weights",
        )


def _check_unexpected(files: SafetensorsSource, found: dict[str, PackedWeight]) -> None:
    """A quantized module may have a bias beside its codes, and nothing else."""
    known = {name for weight in found.values() for name in (*weight.tensors.values(), weight.input_scale)}
    for name in files.names():
        module, _, suffix = name.rpartition(".")
        if f"{module}.weight" in found and name not in known and suffix != "bias":
            raise CheckpointError(
                f"unexpected tensor {name!r} beside {found[f'{module}.weight'].scheme.method} codes",
                at=files.entry(name).file,
                fix="llmc reads the formats that docs/quantization.md lists; requantize with one of them",
            )
