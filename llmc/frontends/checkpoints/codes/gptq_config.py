"""The schemes of weights in the configs of GPTQ, AWQ and AutoRound."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.codes.layouts import AWQ, AWQ_SYMMETRIC, E2M1_GLOBAL, E2M1_POWERS, FLOAT8, GPTQ
from llmc.frontends.checkpoints.codes.stored_scheme import INTEGERS, ModuleGroup, StoredQuantization, StoredScheme
from llmc.frontends.checkpoints.codes.unread import unread

_ALL = ("Linear",)
# The offset that the first of GPTQ's formats subtracts from zeros.
_OFFSET = 1
_FORMAT_KEYS = ("checkpoint_format", "format")
_OF_GPTQ = "2, 3, 4 or 8 bits"


def gptq(config: Mapping[str, Any], file: Path) -> StoredQuantization:
    """GPTQ's weights, and GPTQModel's rules for single modules (`dynamic`). Raises CheckpointError."""
    version = _gptq_format(config, file)
    offset = _OFFSET if version == "gptq" else 0
    whole = _gptq_scheme(config.get("bits"), offset, "bits", file)
    rules = tuple(_rule(key, value, whole, file) for key, value in _object(config, "dynamic", file).items())
    return StoredQuantization("gptq", (*rules, ModuleGroup(_ALL, (whole,))))


def _gptq_format(config: Mapping[str, Any], file: Path) -> str:
    """`gptq` or `gptq_v2`: newer releases of GPTQModel call it `format`. Raises CheckpointError."""
    stated = {key: config[key] for key in _FORMAT_KEYS if config.get(key) is not None}
    for key, version in stated.items():
        if version not in ("gptq", "gptq_v2"):
            raise unread(f"GPTQ's {key} {version!r:.40}", "gptq and gptq_v2", file, "gptq")
    versions = sorted(set(stated.values()))
    if len(versions) > 1:
        stated_ways = " and ".join(f"{key} {version!r}" for key, version in stated.items())
        raise CheckpointError(f"GPTQ's zeros are stored in two ways: {stated_ways}", at=file, fix=_CORRECT)
    return versions[0] if versions else "gptq"


def _gptq_scheme(bits: Any, offset: int, said: str, file: Path) -> StoredScheme:
    if type(bits) is not int or bits not in INTEGERS:
        raise unread(f"GPTQ with {bits!r:.40} bits", _OF_GPTQ, file, "gptq")
    return StoredScheme("gptq", INTEGERS[bits], GPTQ, bits, offset, said=said)


def _rule(key: str, value: Any, whole: StoredScheme, file: Path) -> ModuleGroup:
    """`+:EXPRESSION` or `EXPRESSION` with differing settings, `-:EXPRESSION` for modules that are not quantized."""
    place = f"dynamic[{key!r:.80}]"
    expression = key.removeprefix("+:").removeprefix("-:")
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{place} is not a regular expression: {error}", at=file, fix=_CORRECT) from None
    if key.startswith("-:"):
        return ModuleGroup((f"re:{expression}",), ())
    if not isinstance(value, dict):
        raise CheckpointError(f"{place} is {value!r:.60}, not an object", at=file, fix=_CORRECT)
    bits = value.get("bits", whole.bits)
    return ModuleGroup((f"re:{expression}",), (_gptq_scheme(bits, whole.zero_offset, place, file),))


def awq(config: Mapping[str, Any], file: Path) -> StoredQuantization:
    """AWQ's weights. Raises CheckpointError."""
    bits = config.get("bits", config.get("w_bit"))
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise unread(f"AWQ with {bits} bits in version {version!r}", "4 bits in version 'gemm'", file)
    layout = AWQ if config.get("zero_point", True) else AWQ_SYMMETRIC
    return StoredQuantization("awq", (ModuleGroup(_ALL, (StoredScheme("awq", "int4", layout, 4),)),))


def auto_round(config: Mapping[str, Any], file: Path) -> StoredQuantization:
    """AutoRound's weights, in the format of GPTQ or AWQ that it packs them in, or in eight or four bits of floats.

    Bits of single layers (`extra_config`) follow from the shapes of their tensors. Raises CheckpointError.
    """
    packing = str(config.get("packing_format", config.get("backend", "auto_round:auto_gptq"))).lower()
    symmetric = config.get("sym", True) is not False
    if "awq" in packing:
        integers = StoredScheme("auto-round", "int4", AWQ_SYMMETRIC, 4)
    else:
        # GPTQModel's kernels, and AutoRound's own, read zeros as they are.
        is_less_one = "gptq" in packing and "gptqmodel" not in packing
        offset = _OFFSET if is_less_one else 0
        integers = StoredScheme("auto-round", "int4", GPTQ, None, offset, is_symmetric=symmetric)
    floats = (
        StoredScheme("auto-round", "mxfp4", E2M1_GLOBAL),
        StoredScheme("auto-round", "mxfp4", E2M1_POWERS),
        StoredScheme("auto-round", "fp8", FLOAT8),
    )
    return StoredQuantization("auto-round", (ModuleGroup(_ALL, (integers, *floats)),))


_CORRECT = "download config.json again, or correct it"


def _object(config: Mapping[str, Any], key: str, file: Path) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} is {value!r:.60}, not an object", at=file, fix=_CORRECT)
    return value
