"""compressed-tensors' config groups as schemes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.codes.layouts import E2M1_GLOBAL, E2M1_POWERS, MARLIN_24, PACKED_INTEGERS, ROWS
from llmc.frontends.checkpoints.codes.stored_scheme import INTEGERS, ModuleGroup, StoredQuantization, StoredScheme
from llmc.frontends.checkpoints.codes.unread import unread

METHOD = "compressed-tensors"
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "marlin-24",
)


def compressed_tensors(config: Mapping[str, Any], file: Path) -> StoredQuantization:
    """The schemes of config_groups. Raises CheckpointError."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, dict) or not groups:
        raise _unread("compressed-tensors without config_groups", "those with one or more", file)
    made, notes = [], []
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise _unread(f"the config group {name!r:.40}, which has no weights,", "groups with weights", file)
        scheme, note = _scheme(config, group, file)
        targets = group.get("targets") or ("Linear",)
        made.append(ModuleGroup(tuple(str(target) for target in targets), (scheme,)))
        notes += [note] if note is not None else []
    return StoredQuantization(METHOD, tuple(made), tuple(dict.fromkeys(notes)))


def _scheme(config: Mapping[str, Any], group: dict[str, Any], file: Path) -> tuple[StoredScheme, str | None]:
    """The scheme of one config group, and a note for the build."""
    format = group.get("format") or config.get("format")
    if format not in _FORMATS:
        raise _unread(f"compressed-tensors format {format!r}", ", ".join(_FORMATS), file)
    weights = group["weights"]
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    is_fp4 = format.endswith("fp4-pack-quantized")
    if (kind, bits) not in ([("float", 4)] if is_fp4 else [("int", 4), ("int", 8), ("float", 8)]):
        raise _unread(
            f"compressed-tensors weights of {bits}-bit {kind} in {format}",
            "4- or 8-bit int, 8-bit float, and 4-bit float in mxfp4-pack-quantized and nvfp4-pack-quantized",
            file,
        )
    activation, is_static, note = _activation(group.get("input_activations"), file)
    if is_fp4:
        layout = E2M1_GLOBAL if format.startswith("nv") else E2M1_POWERS
        return StoredScheme(METHOD, "mxfp4", layout, activation=activation), note
    if format == "marlin-24":
        return StoredScheme(METHOD, INTEGERS[bits], MARLIN_24, bits, activation=activation), note
    layout = PACKED_INTEGERS if format == "pack-quantized" else ROWS
    return StoredScheme(
        METHOD,
        "fp8" if kind == "float" else INTEGERS[bits],
        layout,
        bits,
        block=_block(weights, file),
        activation=activation,
        is_static=is_static,
    ), note


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


def _activation(inputs: dict[str, Any] | None, file: Path) -> tuple[str, bool, str | None]:
    """The format of rounded tokens, whether its scale is in the checkpoint, and a note if tokens are left unrounded."""
    if inputs is None:
        return "none", False, None
    bits, kind, strategy = inputs.get("num_bits"), inputs.get("type", "int"), inputs.get("strategy")
    dynamic = inputs.get("dynamic")
    name = "fp8" if kind == "float" else "int8"
    if bits == 8 and kind in ("int", "float") and inputs.get("symmetric", True):
        if dynamic is True and strategy == "token":
            return name, False, None
        if dynamic in (False, None) and strategy in ("tensor", None):
            return name, True, None
    seen = f"{bits}-bit {kind}, strategy {strategy}, dynamic {dynamic}"
    return "none", False, f"activations are meant to be rounded to {seen}: engines leave them as they are"


def _unread(seen: str, known: str, file: Path) -> CheckpointError:
    return unread(seen, known, file, METHOD)
