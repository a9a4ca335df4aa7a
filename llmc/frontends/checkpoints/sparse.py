"""Checkpoints whose weights are stored without their zeros: compressed-tensors' sparse-bitmask and sparse-24-bitmask.

A SparseSource shows each such weight under the name that the model knows, dense, when it is read. Beside a weight's
name, or its module's in newer files, are
    .shape       two integers
    .compressed  the elements that are not zero, row after row; [rows, columns / 2] where they are 2 of each 4
    .bitmask     uint8 [rows, ⌈columns / 8⌉]: bit i of byte b for column 8·b + i
    .row_offsets (sparse-bitmask) where each row's elements begin
Source: compressed-tensors 0.9, the last versions that have these formats.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.codes.quantization_config import compression, sparsity_format
from llmc.frontends.checkpoints.directory_files import read_json
from llmc.frontends.checkpoints.safetensors import HidingSource, SafetensorsSource, check_shape
from llmc.graph.dtype_names import TORCH_DTYPES

BITMASK, BITMASK_24 = "sparse-bitmask", "sparse-24-bitmask"
_REQUIRED = ("shape", "compressed", "bitmask")
_OPTIONAL = ("row_offsets",)
_VALUES = (torch.float32, torch.bfloat16, torch.float16)
_CHECK = "download the checkpoint again, or check how it was compressed"


@dataclass(frozen=True)
class MaskedWeight:
    """A weight stored so. tensors: names in the files by suffix. shape: [out, in]."""

    name: str
    shape: tuple[int, ...]
    tensors: dict[str, str]


class SparseSource(HidingSource):
    """The tensors of such a checkpoint; a WeightSource. Opening reads headers, config.json and shapes.

    Raises CheckpointError for a format that is not known, and for tensors that are not complete.
    """

    def __init__(self, directory: Path) -> None:
        files = SafetensorsSource(directory)
        config = directory / "config.json"
        settings = read_json(config)
        self._format = sparsity_format(settings, config)
        if self._format not in (BITMASK, BITMASK_24):
            raise CheckpointError(
                f"sparsity_config.format is {self._format!r}, which llmc does not read",
                at=config,
                fix=f"llmc reads {BITMASK}, {BITMASK_24}, marlin-24, and dense weights with zeros",
            )
        if compression(settings, config).get("config_groups"):
            raise CheckpointError(
                f"the weights are both {self._format} and quantized, which llmc does not read",
                at=config,
                fix="use the checkpoint before it was quantized, and quantize=int8",
            )
        self._weights = _find(files, self._format)
        hidden = {name for weight in self._weights.values() for name in weight.tensors.values()}
        super().__init__(files, {name: weight.shape for name, weight in self._weights.items()}, hidden)

    def check(self, name: str, shape: tuple[int, ...], *, floating: bool) -> None:
        weight = self._weights.get(name)
        if weight is None:
            self.files.check(name, shape, floating=floating)
        else:
            check_shape(name, weight.shape, shape, self.files.entry(weight.tensors["shape"]).file)
            values = self.files.entry(weight.tensors["compressed"])
            if floating and TORCH_DTYPES.get(values.dtype) not in _VALUES:
                raise CheckpointError(
                    f"tensor {weight.tensors['compressed']!r} is stored as {values.dtype}: codes behind masks, "
                    "which llmc does not read",
                    at=values.file,
                    fix="use the checkpoint before it was quantized (F32, BF16 or F16), and quantize=int8",
                )
            if 0 in values.shape:
                raise CheckpointError(
                    f"tensor {name!r} {list(shape)} holds nothing but zeros: {weight.tensors['compressed']} is empty",
                    at=values.file,
                    fix=_CHECK,
                )

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU, zeros and all. Raises CheckpointError for masks that do not fit."""
        weight = self._weights.get(name)
        if weight is None:
            return self.files.load(name)
        parts = {suffix: self.files.load(stored) for suffix, stored in weight.tensors.items()}
        try:
            return unmasked(parts, weight.shape, is_24=self._format == BITMASK_24)
        except ValueError as error:
            file = self.files.entry(weight.tensors["bitmask"]).file
            raise CheckpointError(f"the masks of {name!r} do not fit: {error}", at=file, fix=_CHECK) from None


def _find(files: SafetensorsSource, format: str) -> dict[str, MaskedWeight]:
    seen: dict[str, dict[str, str]] = {}
    for name in files.names():
        owner, _, suffix = name.rpartition(".")
        if suffix in (*_REQUIRED, *_OPTIONAL):
            weight = owner if owner.endswith(".weight") else f"{owner}.weight"
            seen.setdefault(weight, {})[suffix] = name
    for weight, tensors in seen.items():
        missing = sorted(set(_REQUIRED) - set(tensors))
        if missing:
            raise CheckpointError(
                f"{weight} has {', '.join(sorted(tensors.values()))} but no {missing[0]}",
                at=files.directory,
                fix="download the whole checkpoint again",
            )
    if not seen:
        raise CheckpointError(
            f"config.json says that the weights are {format}, but no tensor ends in .bitmask",
            at=files.directory,
            fix="check that config.json belongs to these weights",
        )
    return {weight: MaskedWeight(weight, _shape(files, parts), parts) for weight, parts in seen.items()}


def _shape(files: SafetensorsSource, tensors: dict[str, str]) -> tuple[int, ...]:
    stored = files.load(tensors["shape"])
    is_integer = not stored.is_floating_point() and not stored.is_complex()
    shape = tuple(stored.flatten().tolist()) if is_integer and stored.numel() <= 8 else ()
    if len(shape) != 2 or min(shape) < 1 or math.prod(shape) >= 1 << 40:
        entry = files.entry(tensors["shape"])
        held = f"{list(shape)}" if shape else f"{stored.dtype} {list(stored.shape)}"
        raise CheckpointError(f"{tensors['shape']} holds {held}, not the sizes of a matrix", at=entry.file, fix=_CHECK)
    return shape


def unmasked(parts: dict[str, Tensor], shape: tuple[int, ...], *, is_24: bool) -> Tensor:
    """The weight of that shape that the tensors of a MaskedWeight say. Raises ValueError where they contradict."""
    rows, columns = shape
    masks, values = parts["bitmask"], parts["compressed"]
    expected = (rows, -(-columns // 8))
    if masks.dtype is not torch.uint8 or tuple(masks.shape) != expected:
        raise ValueError(f"the bitmask is {masks.dtype} {list(masks.shape)}, expected uint8 {list(expected)}")
    bits = (masks[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1).bool()
    if bool(bits[:, columns:].any()):
        raise ValueError(f"the bitmask has bits after the last of {columns} columns")
    kept = bits[:, :columns]
    counts = kept.sum(1)
    if int(counts.sum()) != values.numel():
        raise ValueError(f"the bitmask has {int(counts.sum())} bits for {values.numel()} elements")
    if is_24:
        if tuple(values.shape) != (rows, columns // 2) or columns % 4:
            raise ValueError(f"compressed has shape {list(values.shape)} for {[rows, columns]}")
        if bool((kept.unflatten(1, (-1, 4)).sum(-1) != 2).any()):
            raise ValueError("not 2 of each 4 columns have a bit")
    offsets = parts.get("row_offsets")
    if offsets is not None and not torch.equal(offsets.flatten().long(), counts.cumsum(0) - counts):
        raise ValueError("row_offsets are not where the rows' bits begin")
    return values.new_zeros(shape).masked_scatter(kept, values.flatten())
