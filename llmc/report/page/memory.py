"""The memory of an engine as a report holds it: weights, KV cache, and the plan of the arena."""

import re
from collections import Counter
from typing import Any

from llmc.files.typed_json import to_json
from llmc.program import Program, WeightSlot

_NUMBER = re.compile(r"\d+")


def memory_data(program: Program) -> dict[str, Any]:
    """{"weights": […], "caches": …, "buffers": […], "arena", "unplanned"}: bytes, or affine in T and L."""
    limits = program.limits
    bytes_per_token, longest = program.token_bytes(), limits.blocks_for(limits.max_model_len)
    kept = ((longest, None), *((policy.sequence_blocks(limits, 1), policy.shown) for policy in program.policies))
    return {
        "weights": _weights(program),
        "cache": {
            "layers": len(program.caches),
            "kinds": [{**to_json(cache), "layers": count} for cache, count in Counter(program.caches).items()],
            "token_bytes": sum(bytes_per_token),
            # Per cache group: bytes of a block, the maximum number of blocks of a sequence, and the policy.
            "groups": [
                {"block_bytes": nbytes * limits.block_size, "blocks": blocks, "policy": policy}
                for nbytes, (blocks, policy) in zip(bytes_per_token, kept, strict=True)
            ],
            # The maximum for a sequence that runs alone, including the tokens of a step.
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
    alike: dict[tuple[Any, ...], list[WeightSlot]] = {}
    for slot in program.weights:
        alike.setdefault((_NUMBER.sub("#", slot.name), slot.shape, slot.dtype, slot.layout), []).append(slot)
    rows = [
        {
            "name": name if len(slots) > 1 else slots[0].name,
            "shape": shape,
            "dtype": dtype,
            "layout": layout.value,
            "count": len(slots),
            "bytes": sum(slot.nbytes for slot in slots),
        }
        for (name, shape, dtype, layout), slots in alike.items()
    ]
    return sorted(rows, key=lambda row: -int(row["bytes"]))
