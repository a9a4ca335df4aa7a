"""Weights as a report holds them: what quantization, zeros and pruning did to each, what they save and cost."""

import re
from collections.abc import Sequence
from typing import Any

from llmc.files.typed_json import to_json
from llmc.report.contents import EngineContents
from llmc.report.measured_perplexity import MeasuredPerplexity

_LAYER = re.compile(r"\.(\d+)\.")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def quantization_data(contents: EngineContents, perplexity: MeasuredPerplexity | None) -> dict[str, Any]:
    """{"weights": […], "plain_bits", "cache", "perplexity"}: no weights for an engine without codes.

    A weight has its layer (None outside of layers) and its name within it (`part`). cache: bytes per token as codes and
    in the model's dtype; None if the cache has no codes.
    """
    itemsize = _ITEM_BYTES[contents.manifest.model.dtype]
    return {
        "weights": [to_json(weight) | _place(weight.module) for weight in contents.quantized],
        "plain_bits": 8 * itemsize,
        "cache": _cache(contents, itemsize),
        "perplexity": None if perplexity is None else to_json(perplexity) | {"ratio": perplexity.ratio},
    }


def _place(module: str) -> dict[str, Any]:
    match = _LAYER.search(module)
    if match is None:
        return {"layer": None, "part": module}
    return {"layer": int(match[1]), "part": module[match.end() :]}


def _cache(contents: EngineContents, itemsize: int) -> dict[str, Any] | None:
    caches = contents.program.caches
    formats = dict.fromkeys(cache.format for cache in caches if cache.format is not None)
    if not formats:
        return None
    return {
        "formats": list(formats),
        "token_bytes": contents.manifest.memory["kv_per_token"],
        "plain_bytes": sum(cache.kv_heads * (cache.head_dim + cache.value_dim) * itemsize for cache in caches),
    }


def sparsity_data(contents: EngineContents) -> list[dict[str, Any]]:
    """The record of each weight with zeros (formats/sparse_weight.py) and its gain; empty if there are none."""
    return [to_json(weight) | {"gain": weight.gain} for weight in contents.sparse]


def pruning_data(contents: EngineContents) -> list[dict[str, Any]]:
    """The record of each pruned part (formats/pruned_part.py) with the removed units as runs; empty if nothing was
    pruned."""
    return [to_json(part) | {"runs": _runs(part.removed)} for part in contents.pruned]


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers as runs, such as "1, 4–7, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)
