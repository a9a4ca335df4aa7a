"""A step of a second engine, whose requests have their blocks from the first one."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llmc.runtime.loop.step import Ints, Step


class Reading(NamedTuple):
    """Tokens of a request to be read from position `start` on."""

    blocks: Sequence[int]
    start: int
    tokens: Sequence[int]


def draft_step(readings: Sequence[Reading], block_size: int, wanted: int) -> Step:
    """The step that reads these tokens, in order. wanted: number of the first readings for which it returns logits,
    after the last token of each."""
    counts = np.array([len(reading.tokens) for reading in readings], np.int32)
    starts = np.array([reading.start for reading in readings], np.int32)
    query_starts = np.zeros(len(readings) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    context_lens = starts + counts
    tables = _tables(readings, -(-int(context_lens.max()) // block_size))
    owners = np.repeat(np.arange(len(readings)), counts)
    positions = np.arange(len(owners), dtype=np.int32) + (starts - query_starts[:-1])[owners]
    index, inside = np.divmod(positions, np.int32(block_size))
    return Step(
        input_ids=np.fromiter((token for reading in readings for token in reading.tokens), np.int32, len(owners)),
        positions=positions,
        slot_mapping=tables[owners, index] * np.int32(block_size) + inside,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=tables,
        logit_rows=query_starts[1 : wanted + 1] - np.int32(1),
        tree_masks=np.zeros(len(owners), np.int64),
    )


def _tables(readings: Sequence[Reading], width: int) -> Ints:
    tables = np.zeros((len(readings), width), np.int32)
    for row, reading in zip(tables, readings, strict=True):
        count = min(width, len(reading.blocks))
        row[:count] = reading.blocks[:count]
    return tables
