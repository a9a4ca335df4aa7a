"""The quantization settings in the files of a model directory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.checkpoints.codes.bitsandbytes import INT8, NF4
from llmc.frontends.checkpoints.codes.compressed_config import compressed_tensors
from llmc.frontends.checkpoints.codes.expert_blocks import EXPERT_BLOCKS
from llmc.frontends.checkpoints.codes.float8_config import fbgemm, float8, modelopt
from llmc.frontends.checkpoints.codes.gptq_config import auto_round, awq, gptq
from llmc.frontends.checkpoints.codes.stored_scheme import ModuleGroup, StoredQuantization, StoredScheme
from llmc.frontends.checkpoints.codes.unread import unread
from llmc.frontends.checkpoints.directory_files import read_json

_CONFIG = "config.json"
# Files of their own that say it where config.json does not, and what quantized the weights if they do not name it.
_OTHER_FILES = (
    ("hf_quant_config.json", "modelopt"),
    ("quantization_config.json", "gptq"),
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
)
_KEYS = ("quantization_config", "compression_config")


def _bitsandbytes(config: Mapping[str, Any], file: Path) -> StoredQuantization:
    """Each module is NF4 or LLM.int8 by its tensors."""
    schemes = (StoredScheme("bitsandbytes", "nf4", NF4), StoredScheme("bitsandbytes", "int8", INT8, 8))
    return StoredQuantization("bitsandbytes", (ModuleGroup(("Linear",), schemes),))


def _gpt_oss(config: Mapping[str, Any], file: Path) -> StoredQuantization:
    schemes = (StoredScheme("mxfp4", "mxfp4", EXPERT_BLOCKS),)
    return StoredQuantization("mxfp4", (ModuleGroup(("Linear",), schemes),))


METHODS: Mapping[str, Callable[[Mapping[str, Any], Path], StoredQuantization]] = {
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "compressed-tensors": compressed_tensors,
    "fp8": float8,
    "fbgemm_fp8": fbgemm,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "mxfp4": _gpt_oss,
    "bitsandbytes": _bitsandbytes,
}


def stored_quantization(config: Mapping[str, Any], file: Path) -> StoredQuantization:
    """The schemes that a quantization_config names. file: that it is in. Raises CheckpointError for one that is not
    read. GPTQModel calls its method `method` where `quant_method` is missing."""
    method = str(config.get("quant_method") or config.get("method") or "unknown").lower()
    if method not in METHODS:
        known = f"{', '.join(METHODS)}, and unquantized checkpoints (F32, BF16 or F16)"
        raise unread(f"the checkpoint is quantized by {method!r:.60}, which", known, file, method)
    return METHODS[method](config, file)


def quantization_of(directory: Path) -> tuple[dict[str, Any], Path] | None:
    """The quantization settings of a directory and their file; None if there are none.

    config.json takes precedence over separate files. Settings of compressed-tensors that are only about sparsity do not
    count. Raises CheckpointError.
    """
    file = directory / _CONFIG
    settings = read_json(file) if file.is_file() else {}
    config = compression(settings, file)
    if config:
        is_sparse_alone = "sparsity_config" in config and not config.get("config_groups")
        return None if is_sparse_alone else (config, file)
    for name, method in _OTHER_FILES:
        other = directory / name
        if other.is_file() and (stated := _stated(read_json(other), method, other)):
            return stated, other
    return None


def _stated(settings: dict[str, Any], method: str, file: Path) -> dict[str, Any]:
    """A file's own object, which ModelOpt puts into another; empty where it says nothing of bits."""
    inner = settings.get("quantization", settings)
    stated = checked_object(inner, "quantization", file)
    config = stated if stated.get("method") else {"quant_method": method, **stated}
    return config if any(key in config for key in ("bits", "w_bit", "quant_algo", "config_groups")) else {}


def compression(settings: dict[str, Any], file: Path) -> dict[str, Any]:
    """The settings in a config.json about stored weights, also under compressed-tensors' older name, or in the config
    of the text half; empty if there are none.

    Raises CheckpointError if the settings are not an object."""
    text = settings.get("text_config")
    for section in (settings, text if isinstance(text, dict) else {}):
        name = next((key for key in _KEYS if section.get(key)), None)
        if name is not None:
            return checked_object(section[name], name, file)
    return {}


def checked_object(value: Any, name: str, file: Path) -> dict[str, Any]:
    """A value of config.json that has to be an object. Raises CheckpointError."""
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{name} is {value!r:.80}, not an object", at=file, fix="download config.json again, or correct it"
        )
    return value


def sparsity_format(settings: dict[str, Any], file: Path) -> str | None:
    """The format of masks that a config.json names; None if weights are dense, or codes. Raises CheckpointError."""
    sparsity = compression(settings, file).get("sparsity_config") or {}
    format: str | None = checked_object(sparsity, "sparsity_config", file).get("format")
    return None if format == "dense" else format
