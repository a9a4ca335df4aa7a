"""What config.json says of how a checkpoint's weights are quantized."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.formats.code_format import CODE_FORMATS

# Suffixes of a weight's tensors in compressed-tensors' marlin-24.
MARLIN_24 = ("weight_packed", "scale_packed", "meta")
# What gpt-oss appends to the name of a layer's experts' matrices.
EXPERT_BLOCKS = ("blocks", "scales")
METHODS = ("gptq", "awq", "compressed-tensors", "mxfp4")
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "marlin-24",
)


@dataclass(frozen=True)
class StoredScheme:
    """method: one of METHODS. format: of the codes: int4, int8, fp8 or mxfp4 (which also stands for NVIDIA's e2m1 in
    groups of 16). required, optional: suffixes of a weight's
    tensors. zero_offset: what GPTQ's stored zeros lack. block: rows and columns that share a scale; None for all of a
    row or tensor. activation: what tokens are rounded to: none, int8 or fp8; with a static scale in the checkpoint if
    is_static."""

    method: str
    format: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    activation: str = "none"
    is_static: bool = False

    @property
    def bits(self) -> int:
        """Of a code."""
        return CODE_FORMATS[self.format].bits

    @property
    def suffixes(self) -> tuple[str, ...]:
        """All that mark a quantized module."""
        return (*self.required, *self.optional)


@dataclass(frozen=True)
class ModuleGroup:
    """The modules that share a scheme. targets: as in compressed-tensors: names, regular expressions after `re:`, or
    the name of a class, which here stands for all."""

    targets: tuple[str, ...]
    scheme: StoredScheme


def scheme_of(module: str, groups: Sequence[ModuleGroup]) -> StoredScheme | None:
    """Of the group that names the module, else of the first whose expression matches it, else of one of a class."""

    def matches(target: str, kind: int) -> bool:
        if kind == 0:
            return target == module
        if target.startswith("re:"):
            return kind == 1 and re.match(target[3:], module) is not None
        return kind == 2 and "." not in target

    found = (g.scheme for kind in range(3) for g in groups if any(matches(target, kind) for target in g.targets))
    return next(found, None)


def compression(settings: dict[str, Any], file: Path) -> dict[str, Any]:
    """What a config.json says of how weights are stored, also under compressed-tensors' older name; empty if nothing.

    Raises CheckpointError where that is no object."""
    name = next((each for each in ("quantization_config", "compression_config") if settings.get(each)), None)
    return {} if name is None else checked_object(settings[name], name, file)


def checked_object(value: Any, name: str, file: Path) -> dict[str, Any]:
    """A value of config.json that has to be an object. Raises CheckpointError."""
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{name} is {value!r:.80}, not an object", at=file, fix="download config.json again, or correct it"
        )
    return value


def is_quantized(settings: dict[str, Any], file: Path) -> bool:
    """Whether config.json says that weights are codes. What compressed-tensors says of zeros alone is not that."""
    config = compression(settings, file)
    return bool(config) and not ("sparsity_config" in config and not config.get("config_groups"))


def sparsity_format(settings: dict[str, Any], file: Path) -> str | None:
    """The format of masks that a config.json names; None where weights are dense, or codes. Raises CheckpointError."""
    sparsity = compression(settings, file).get("sparsity_config") or {}
    format: str | None = checked_object(sparsity, "sparsity_config", file).get("format")
    return None if format == "dense" else format


def stored_schemes(settings: dict[str, Any], file: Path) -> tuple[ModuleGroup, ...]:
    """The schemes in a config.json; raises CheckpointError for one that llmc does not read."""
    config = compression(settings, file)
    method = config.get("quant_method", "unknown")
    if method == "gptq":
        return (ModuleGroup(("Linear",), _gptq(config, file)),)
    if method == "awq":
        return (ModuleGroup(("Linear",), _awq(config, file)),)
    if method == "compressed-tensors":
        return _compressed(config, file)
    if method == "mxfp4":
        return (ModuleGroup(("Linear",), StoredScheme("mxfp4", "mxfp4", EXPERT_BLOCKS, ())),)
    raise CheckpointError(
        f"the checkpoint is quantized by {method!r}, which llmc does not read",
        at=file,
        fix=f"use one of {', '.join(METHODS)}, or the original F32, BF16 or F16 checkpoint",
    )


def _gptq(config: dict[str, Any], file: Path) -> StoredScheme:
    bits = config.get("bits")
    if bits not in (4, 8):
        raise _unread(f"GPTQ with {bits} bits", "4 or 8 bits", file)
    version = config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _unread(f"GPTQ's checkpoint_format {version!r}", "gptq or gptq_v2", file)
    offset = 1 if version == "gptq" else 0
    return StoredScheme("gptq", f"int{bits}", ("qweight", "qzeros", "scales"), ("g_idx",), offset)


def _awq(config: dict[str, Any], file: Path) -> StoredScheme:
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _unread(f"AWQ with {bits} bits in version {version!r}", "4 bits in version 'gemm'", file)
    required = ("qweight", "scales", *(("qzeros",) if config.get("zero_point", True) else ()))
    return StoredScheme("awq", "int4", required, ("qzeros",))


def _compressed(config: dict[str, Any], file: Path) -> tuple[ModuleGroup, ...]:
    groups = list((config.get("config_groups") or {}).values())
    if not groups:
        raise _unread("compressed-tensors without config_groups", "those with one or more", file)
    return tuple(
        ModuleGroup(tuple(group.get("targets") or ("Linear",)), _compressed_group(config, group, file))
        for group in groups
    )


def _compressed_group(config: dict[str, Any], group: dict[str, Any], file: Path) -> StoredScheme:
    format = group.get("format") or config.get("format")
    if format not in _FORMATS:
        raise _unread(f"compressed-tensors format {format!r}", ", ".join(_FORMATS), file)
    weights, inputs = group["weights"], group.get("input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    is_fp4 = format.endswith("fp4-pack-quantized")
    if (kind, bits) not in ([("float", 4)] if is_fp4 else [("int", 4), ("int", 8), ("float", 8)]):
        raise _unread(
            f"compressed-tensors weights of {bits}-bit {kind} in {format}",
            "4- or 8-bit int, 8-bit float, and 4-bit float in mxfp4-pack-quantized and nvfp4-pack-quantized",
            file,
        )
    activation, is_static = _activation(inputs, file)
    if is_fp4:
        required = ("weight_packed", "weight_scale", *(("weight_global_scale",) if format.startswith("nv") else ()))
        return StoredScheme("compressed-tensors", "mxfp4", required, (), activation=activation)
    if format == "marlin-24":
        return StoredScheme("compressed-tensors", f"int{bits}", MARLIN_24, (), activation=activation)
    is_packed = format == "pack-quantized"
    optional = ("weight_g_idx",) + (() if weights.get("symmetric", True) else ("weight_zero_point",))
    return StoredScheme(
        "compressed-tensors",
        "fp8" if kind == "float" else f"int{bits}",
        ("weight_packed", "weight_scale", "weight_shape") if is_packed else ("weight", "weight_scale"),
        (*optional, "input_scale") if is_static else optional,
        block=_block(weights, file),
        activation=activation,
        is_static=is_static,
    )


def _block(weights: dict[str, Any], file: Path) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None for all of a row or tensor."""
    if weights.get("strategy") == "group" and (weights.get("group_size") or 0) > 0:
        return 1, int(weights["group_size"])
    if weights.get("strategy") != "block":
        return None
    structure: Any = weights.get("block_structure")
    # Older files have a text, such as 128x128.
    sides: Any = structure.split("x") if isinstance(structure, str) else structure
    try:
        rows, columns = (int(side) for side in sides)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise _unread(f"strategy 'block' with block_structure {structure!r}", "two sizes, such as [128, 128]", file)
    return rows, columns


def _activation(inputs: dict[str, Any] | None, file: Path) -> tuple[str, bool]:
    """What tokens are rounded to, and whether the scale is in the checkpoint."""
    if inputs is None:
        return "none", False
    bits, kind, strategy = inputs.get("num_bits"), inputs.get("type", "int"), inputs.get("strategy")
    seen = f"activations of {bits}-bit {kind}, strategy {strategy}"
    if bits != 8 or kind not in ("int", "float") or not inputs.get("symmetric", True):
        raise _unread(seen, "symmetric 8-bit int or float", file)
    name = "fp8" if kind == "float" else "int8"
    if inputs.get("dynamic") is True and strategy == "token":
        return name, False
    if inputs.get("dynamic") in (False, None) and strategy in ("tensor", None):
        return name, True
    raise _unread(f"{seen}, dynamic {inputs.get('dynamic')}", "dynamic per token, or static per tensor", file)


def _unread(seen: str, known: str, file: Path) -> CheckpointError:
    return CheckpointError(f"{seen} is not read", at=file, fix=f"llmc reads {known}")
