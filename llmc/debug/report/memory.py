"""The memory of an engine as a report holds it: weights, KV cache, and the plan of the arena."""

import re
from typing import Any

from llmc.files.typed_json import to_json
from llmc.program import Program

_NUMBER = re.compile(r"\d+")


def memory_data(program: Program) -> dict[str, Any]:
    """{"weights": […], "caches": …, "buffers": […], "arena", "unplanned"}: bytes, or affine in T and L."""
    limits = program.limits
    each, longest = program.token_bytes(), limits.blocks_for(limits.max_model_len)
    return {
        "weights": _weights(program),
        "cache": {
            "layers": len(program.caches),
            "kinds": _cache_kinds(program),
            "token_bytes": sum(each),
            # Of a block in the layers of each group, how many a sequence holds at most, and how far these layers see.
            "groups": [
                {"block_bytes": nbytes * limits.block_size, "blocks": blocks, "reach": reach}
                for nbytes, (blocks, reach) in zip(
                    each,
                    ((longest, None), *((r.blocks_of_sequence(limits, 1), str(r)) for r in program.reaches)),
                    strict=True,
                )
            ],
            # Of one that is alone, with the tokens of a step.
            "sequence_bytes": sum(program.memories(longest).values()),
        },
        "buffers": [
            {
                "name": buffer.name,
                "dtype": buffer.dtype,
                "rows": buffer.rows.value,
                "columns": buffer.columns,
                "offset": to_json(buffer.offset),
                "first": buffer.first_launch,
                "last": buffer.last_launch,
            }
            for buffer in program.buffers
        ],
        "arena": to_json(program.arena),
        "unplanned": to_json(program.unplanned_arena),
    }


def _weights(program: Program) -> list[dict[str, Any]]:
    """Weights that differ only by a number in their name, and are otherwise the same, as one row."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for slot in program.weights:
        name = _NUMBER.sub("#", slot.name)
        row = rows.setdefault(
            (name, slot.shape, slot.dtype, slot.layout),
            {
                "name": slot.name,
                "shape": slot.shape,
                "dtype": slot.dtype,
                "layout": slot.layout.value,
                "count": 0,
                "bytes": 0,
            },
        )
        row["count"] += 1
        row["bytes"] += slot.nbytes
        if row["count"] > 1:
            row["name"] = name
    return sorted(rows.values(), key=lambda row: -int(row["bytes"]))


def _cache_kinds(program: Program) -> list[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for cache in program.caches:
        kind = kinds.setdefault(str(cache), {**to_json(cache), "layers": 0})
        kind["layers"] += 1
    return list(kinds.values())
