"""The schemes of float8 and float4 weights in the configs of transformers, DeepSeek, fbgemm and ModelOpt."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.codes.layouts import (
    FLOAT8,
    FLOAT8_INVERSE,
    INT8_ROWS,
    MODELOPT_MXFP4,
    MODELOPT_NVFP4,
)
from llmc.frontends.checkpoints.codes.stored_scheme import ModuleGroup, StoredQuantization, StoredScheme
from llmc.frontends.checkpoints.codes.unread import unread

_ALL = ("Linear",)
_DEFAULT_BLOCK = (128, 128)
# ModelOpt's names of layouts that its tensors distinguish.
_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "MXFP4",
    "W4A8_MXFP4_FP8",
    "W8A16",
    "MIXED_PRECISION",
)
_UNROUNDED = "the checkpoint's activations are meant to be rounded to {}: engines leave them as they are"


def float8(config: Mapping[str, Any], file: Path) -> StoredQuantization:
    """e4m3 with a scale for each block, row or tensor (DeepSeek V3, Qwen3, MiniMax, Ministral). Raises
    CheckpointError."""
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise unread(f"float8 of the kind {config['fmt']!r:.40}", "e4m3", file)
    block = _block(config, file)
    schemes = tuple(StoredScheme("fp8", "fp8", layout, block=block) for layout in (FLOAT8_INVERSE, FLOAT8))
    # Blocks of activations get scales as they come, which changes nothing that is stored.
    static = config.get("activation_scheme") == "static"
    notes = (_UNROUNDED.format("e4m3"),) if static else ()
    return StoredQuantization("fp8", (ModuleGroup(_ALL, schemes),), notes)


def fbgemm(config: Mapping[str, Any], file: Path) -> StoredQuantization:
    """e4m3 with a scale per row."""
    return StoredQuantization("fbgemm_fp8", (ModuleGroup(_ALL, (StoredScheme("fbgemm_fp8", "fp8", FLOAT8),)),))


def modelopt(config: Mapping[str, Any], file: Path) -> StoredQuantization:
    """e4m3, NVFP4, MXFP4 and int8, whichever each module's tensors are; rules for single layers say no more than that.
    Raises CheckpointError."""
    algorithm = config.get("quant_algo")
    if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
        raise unread(f"ModelOpt's quant_algo {algorithm!r:.60}", ", ".join(_ALGORITHMS), file)
    schemes = (
        StoredScheme("modelopt", "mxfp4", MODELOPT_NVFP4),
        StoredScheme("modelopt", "mxfp4", MODELOPT_MXFP4),
        StoredScheme("modelopt", "fp8", FLOAT8, block=_DEFAULT_BLOCK),
        StoredScheme("modelopt", "int8", INT8_ROWS, 8),
    )
    kind = str(algorithm or "").upper()
    rounded = "" if kind.startswith(("W4A16", "W8A16")) or kind.endswith("_WO") else "e2m1" if "FP4" in kind else "e4m3"
    notes = (_UNROUNDED.format(rounded),) if rounded else ()
    return StoredQuantization("modelopt", (ModuleGroup(_ALL, schemes),), notes)


def _block(config: Mapping[str, Any], file: Path) -> tuple[int, int] | None:
    stated: Any = config.get("weight_block_size", _DEFAULT_BLOCK)
    if stated is None:
        return None
    try:
        rows, columns = (side for side in stated)
    except (TypeError, ValueError):
        rows = columns = None
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise CheckpointError(
            f"weight_block_size is {stated!r:.60}, not two sizes",
            at=file,
            fix="download config.json again, or correct it: [128, 128], for one",
        )
    return rows, columns
