"""A step as tiles of a fixed number of rows, each of one request; a token's position gives its row in the tile.

For a model that reads whole texts, a tile is a text. Tokens of a tree with equal or skipped positions form separate
tiles.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmc.program import RowCount, SideOutput
from llmc.runtime.executors.executor import Logits, SideArray
from llmc.runtime.executors.step_parts import part_of
from llmc.runtime.loop.step import Ints, Step

TILE = 16
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Tile:
    """A step of TILE rows, or of a text: which are tokens of the whole step, and which give logits that are wanted."""

    step: Step
    tokens: Ints
    wanted: Ints


def tiles_of(step: Step, spare_slots: Sequence[int]) -> Iterator[Tile]:
    """The step's tokens, in order. spare_slots: one slot of each group of caches, for the rows without a token.

    Each token is a separate request, so that attention also computes it on its own.
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
    """Yield each request as a separate step, with the logit rows that it needs."""
    for request in range(len(step.context_lens)):
        text = part_of(step, np.array([request]))
        tokens, wanted = (np.arange(len(values), dtype=np.int32) for values in (text.tokens, text.wanted))
        yield Tile(text.step, tokens, wanted)


def run_tiles(
    tiles: Iterable[Tile], sides: Sequence[SideOutput], run: Callable[[Tile], Sequence[Any]]
) -> tuple[Logits, dict[str, SideArray]]:
    """The whole step's logits and side outputs. run: gives a tile's as arrays, in that order."""
    chosen: list[Logits] = []
    of_sides: list[list[SideArray]] = [[] for _ in sides]
    for tile in tiles:
        logits, *others = run(tile)
        chosen.append(logits[tile.wanted])
        for side, rows, value in zip(sides, of_sides, others, strict=True):
            rows.append(value[tile.wanted if side.rows is RowCount.LOGIT_ROWS else tile.tokens])
    return np.concatenate(chosen), {side.name: np.concatenate(rows) for side, rows in zip(sides, of_sides, strict=True)}


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
    groups = None if step.group_slots is None else zip(step.group_slots[:, tokens], spares[1:], strict=True)
    rows = np.arange(first_row + 1, first_row + count + 1, dtype=np.int32)
    dropped = None if step.group_lens is None else step.context_lens[request] - step.group_lens[:, request]
    wanted = np.flatnonzero(is_wanted[tokens]).astype(np.int32) + place
    return Tile(
        Step(
            input_ids=_placed(step.input_ids[tokens], inside),
            positions=_placed(step.positions[tokens], inside),
            slot_mapping=_placed(step.slot_mapping[tokens], inside, spares[0]),
            query_starts=np.arange(place, place + count + 1, dtype=np.int32),
            context_lens=rows,
            block_tables=step.block_tables[[request] * count],
            # All of them, so that the last product also has the same number of rows in every tile.
            logit_rows=np.arange(TILE if len(wanted) else 1, dtype=np.int32),
            tree_masks=_placed(step.tree_masks[tokens], inside),
            hidden=None if step.hidden is None else _placed(step.hidden[tokens], inside),
            state_slots=None if step.state_slots is None else step.state_slots[[request] * count],
            group_slots=None if groups is None else np.stack([_placed(own, inside, spare) for own, spare in groups]),
            group_tables=None if step.group_tables is None else step.group_tables[:, [request] * count],
            group_lens=None if dropped is None else rows - dropped[:, None],
        ),
        np.arange(place, place + count, dtype=np.int32),
        wanted,
    )


def _placed(rows: npt.NDArray[Scalar], inside: slice, fill: int = 0) -> npt.NDArray[Scalar]:
    """Rows of a tile, with `fill` in those that no token takes."""
    whole = np.full((TILE, *rows.shape[1:]), fill, rows.dtype)
    whole[inside] = rows
    return whole
