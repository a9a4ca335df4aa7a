"""A step of a drafter that reads hidden states in addition to tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from llmc.runtime.loop.step import Step
from llmc.runtime.speculation.draft_step import Reading, draft_step
from llmc.runtime.speculation.growing_tree import Level
from llmc.runtime.speculation.hidden_rows import Hidden


class HiddenReading(NamedTuple):
    """Tokens of a request to be read into rows `start`… of its drafter's cache, each with the hidden state before it.

    blocks: the request's table without the unread blocks at its beginning. skipped: number of rows in these blocks.
    """

    blocks: Sequence[int]
    skipped: int
    start: int
    tokens: Sequence[int]
    hidden: Hidden


def hidden_step(readings: Sequence[HiddenReading], block_size: int, wanted: int, sides: tuple[str, ...]) -> Step:
    """Return a step as draft_step does; rows keep their own positions where earlier ones are skipped."""
    local = [Reading(reading.blocks, reading.start - reading.skipped, reading.tokens) for reading in readings]
    step = draft_step(local, block_size, wanted)
    counts = [len(reading.tokens) for reading in readings]
    skipped = np.repeat(np.array([reading.skipped for reading in readings], np.int32), counts)
    hidden = np.concatenate([reading.hidden for reading in readings])
    return replace(step, positions=step.positions + skipped, hidden=hidden, sides=sides)


def level_step(levels: Sequence[tuple[HiddenReading, Level]], block_size: int, sides: tuple[str, ...]) -> Step:
    """The step that reads nodes of trees, each with the path to it visible, and returns logits for all of them."""
    readings = [reading for reading, _ in levels]
    step = hidden_step(readings, block_size, 0, sides)
    depths = [depth - place for _, level in levels for place, depth in enumerate(level.depths, level.first + 1)]
    masks = [mask for _, level in levels for mask in level.masks]
    return replace(
        step,
        positions=step.positions + np.array(depths, np.int32),
        tree_masks=np.array(masks, np.int64),
        logit_rows=np.arange(len(masks), dtype=np.int32),
    )
