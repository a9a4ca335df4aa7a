"""The settings of an adapter in adapter_config.json: its scales, and whether llmc supports its kind."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import AdapterError

CONFIG = "adapter_config.json"
_MOST_CONFIG_BYTES = 1 << 20
_MOST_RANK = 4096

# Keys that change what an adapter computes, and what they make of it.
_REFUSED = {
    "use_dora": "is DoRA, which scales each row of the weight by its norm",
    "lora_bias": "adds a bias to lora_B",
    "target_parameters": "adapts parameters (target_parameters), not modules",
    "layer_replication": "repeats layers (layer_replication)",
    "trainable_token_indices": "trains single tokens (trainable_token_indices)",
    "alora_invocation_tokens": "begins at invocation tokens (aLoRA)",
    "use_qalora": "is QALoRA, which pools the input",
    "use_bdlora": "is BD-LoRA, whose matrices are block-diagonal",
    "arrow_config": "is a router of adapters (Arrow)",
    "kasa_config": "is KaSA, which has its own singular values",
    "megatron_config": "was made for Megatron's parallel layers",
}
# Initializations that take something out of the base weight, so that the adapter fits only what is left of it.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class PeftConfig:
    """The part of adapter_config.json that decides what is computed.

    ranks: the ranks that modules may have. alpha: the alpha of modules that no pattern names. alpha_patterns: in order,
    a regular expression that the end of a module's name must match, and its alpha.
    """

    ranks: frozenset[int]
    alpha: float
    alpha_patterns: tuple[tuple[re.Pattern[str], float], ...]
    rank_stabilized: bool

    def scale(self, module: str, rank: int) -> float:
        """The factor of a module's B·A: α/r, or α/√r with rank stabilization (Kalajdzievski 2023)."""
        named = (alpha for pattern, alpha in self.alpha_patterns if pattern.fullmatch(module))
        alpha = next(named, self.alpha)
        return alpha / (rank**0.5 if self.rank_stabilized else rank)


def read_config(directory: Path) -> PeftConfig:
    """Read the config of a LoRA adapter. Raises AdapterError with the reason if it is not one, or of a kind that llmc
    does not support."""
    file = directory / CONFIG
    values = _object(file)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"the adapter is of kind {kind!r:.40}, not LORA", at=file, fix="llmc applies LoRA adapters")
    for key, reason in _REFUSED.items():
        if values.get(key):
            raise AdapterError(f"the adapter {reason}", at=f"{file}: {key}", fix=_MERGE_IT)
    if values.get("bias", "none") != "none":
        raise AdapterError(f"the adapter has biases: bias is {values['bias']!r:.40}", at=file, fix=_MERGE_IT)
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"the adapter began as {start:.40}, which changes the base weights that it is added to",
            at=f"{file}: init_lora_weights",
            fix="save it with path_initial_model_for_weight_conversion, which makes a plain LoRA adapter of it",
        )
    rank_pattern = _numbers(values, "rank_pattern", file)
    ranks = frozenset(_rank(rank, file) for rank in (values.get("r", 8), *rank_pattern.values()))
    alphas = _numbers(values, "alpha_pattern", file)
    patterns = tuple((_pattern(key, file), float(value)) for key, value in alphas.items())
    alpha = _number(values.get("lora_alpha", 8), "lora_alpha", file)
    return PeftConfig(ranks, alpha, patterns, bool(values.get("use_rslora")))


_MERGE_IT = "merge it with peft (merge_and_unload) and build the merged model"


def _object(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MOST_CONFIG_BYTES:
            raise AdapterError(
                f"the file has {file.stat().st_size} bytes", at=file, fix="this is not an adapter's config"
            )
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(
            f"cannot read it as JSON: {error}", at=file, fix="name a directory that PEFT's save_pretrained has written"
        ) from None
    if not isinstance(values, dict):
        raise AdapterError(f"holds a JSON {type(values).__name__}, not an object", at=file)
    return values


def _numbers(values: Mapping[str, Any], key: str, file: Path) -> dict[str, float]:
    pattern = values.get(key) or {}
    if not isinstance(pattern, dict):
        raise AdapterError(f"{key} is {pattern!r:.60}, not an object of numbers", at=file)
    return {name: _number(value, f"{key}[{name!r:.60}]", file) for name, value in pattern.items()}


def _number(value: Any, key: str, file: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise AdapterError(f"{key} is {value!r:.60}, not a number", at=file)
    return value


def _rank(value: Any, file: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_RANK:
        raise AdapterError(f"a rank is {value!r:.60}, not a whole number from 1 to {_MOST_RANK}", at=file)
    return value


def _pattern(text: str, file: Path) -> re.Pattern[str]:
    """Compile a pattern of module names, which matches as in PEFT. Expressions that could take forever on a long name
    are refused."""
    if len(text) > 200 or len(re.findall(r"[*+{]", text)) > 3 or re.search(r"\)[*+{]|\\\d|\(\?", text):
        raise AdapterError(
            f"the pattern {text!r:.80} repeats too much", at=f"{file}: alpha_pattern", fix="name modules"
        )
    try:
        return re.compile(rf"(.*\.)?({text})")
    except re.error as error:
        raise AdapterError(
            f"the pattern {text!r:.80} is not a regular expression: {error}", at=f"{file}: alpha_pattern"
        ) from None
