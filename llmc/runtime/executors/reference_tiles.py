"""A step as tiles of a fixed number of rows, each of one request; positions say which row of its tile a token is.

Of a model that reads texts as a whole a tile is a text.
Tokens of a tree that have the same position, or skip some, come in tiles of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.runtime.loop.step import Ints, Step

TILE = 16


@dataclass(frozen=True)
class Tile:
    """A step of TILE rows, or of a text: which are tokens of the whole step, and which give logits that are wanted."""

    step: Step
    tokens: Ints
    wanted: Ints


def tiles_of(step: Step, spare_slots: Sequence[int]) -> Iterator[Tile]:
    """The step's tokens, in order. spare_slots: of each group of caches, for the rows without a token.

    Each token is a request of its own: attention, too, then computes it alone.
    """
    is_wanted = np.zeros(len(step.input_ids), np.bool_)
    is_wanted[step.logit_rows] = True
    for r in range(len(step.context_lens)):
        begin, end = int(step.query_starts[r]), int(step.query_starts[r + 1])
        while begin < end:
            position = int(step.positions[begin])
            place = position % TILE
            stop = min(begin + TILE - place, end)
            if step.tree_masks[end - 1]:
                follows = step.positions[begin:stop] == np.arange(position, position + stop - begin)
                stop = begin + int(np.argmin(np.append(follows, False)))
            first_row = int(step.context_lens[r]) - (end - begin)
            yield _tile(step, slice(begin, stop), place, first_row, r, is_wanted, spare_slots)
            begin = stop


def texts_of(step: Step) -> Iterator[Tile]:
    """Each request as a step of its own, with the rows that it wants."""
    for r, table in enumerate(step.block_tables):
        tokens = slice(int(step.query_starts[r]), int(step.query_starts[r + 1]))
        wanted = step.logit_rows[(step.logit_rows >= tokens.start) & (step.logit_rows < tokens.stop)] - tokens.start
        count = tokens.stop - tokens.start
        alone = Step(
            input_ids=step.input_ids[tokens],
            positions=step.positions[tokens],
            slot_mapping=step.slot_mapping[tokens],
            query_starts=np.array([0, count], np.int32),
            context_lens=step.context_lens[r : r + 1],
            block_tables=table[None],
            logit_rows=wanted.astype(np.int32),
            tree_masks=step.tree_masks[tokens],
            window_slots=None if step.window_slots is None else step.window_slots[:, tokens],
            window_tables=None if step.window_tables is None else step.window_tables[:, r : r + 1],
        )
        yield Tile(alone, np.arange(count, dtype=np.int32), np.arange(len(wanted), dtype=np.int32))


def _tile(
    step: Step,
    tokens: slice,
    place: int,
    first_row: int,
    request: int,
    is_wanted: np.ndarray[tuple[int], np.dtype[np.bool_]],
    spares: Sequence[int],
) -> Tile:
    count = tokens.stop - tokens.start
    inside = slice(place, place + count)
    ids, positions = np.zeros(TILE, np.int32), np.zeros(TILE, np.int32)
    masks = np.zeros(TILE, np.int64)
    ids[inside], positions[inside] = step.input_ids[tokens], step.positions[tokens]
    masks[inside] = step.tree_masks[tokens]
    slots, tables = _slots(step.slot_mapping[tokens], inside, spares[0]), step.block_tables[[request] * count]
    windows = None if step.window_slots is None else zip(step.window_slots[:, tokens], spares[1:], strict=True)
    wanted = np.flatnonzero(is_wanted[tokens]).astype(np.int32) + place
    return Tile(
        Step(
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
            query_starts=np.arange(place, place + count + 1, dtype=np.int32),
            context_lens=np.arange(first_row + 1, first_row + count + 1, dtype=np.int32),
            block_tables=tables,
            # All of them, so that the last product has as many rows in every tile as well.
            logit_rows=np.arange(TILE if len(wanted) else 1, dtype=np.int32),
            tree_masks=masks,
            hidden=None if step.hidden is None else _hidden(step.hidden[tokens], inside),
            state_slots=None if step.state_slots is None else step.state_slots[[request] * count],
            window_slots=None if windows is None else np.stack([_slots(own, inside, spare) for own, spare in windows]),
            window_tables=None if step.window_tables is None else step.window_tables[:, [request] * count],
        ),
        np.arange(place, place + count, dtype=np.int32),
        wanted,
    )


def _slots(slots: Ints, inside: slice, spare: int) -> Ints:
    whole = np.full(TILE, spare, np.int32)
    whole[inside] = slots
    return whole


def _hidden(rows: npt.NDArray[np.float32], inside: slice) -> npt.NDArray[np.float32]:
    whole = np.zeros((TILE, rows.shape[1]), np.float32)
    whole[inside] = rows
    return whole
