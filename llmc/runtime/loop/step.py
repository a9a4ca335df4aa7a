"""The inputs of a step: the same arrays for any mix of requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.program import GROUP_INPUTS, group_input

Ints = npt.NDArray[np.int32]
Masks = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One step's inputs, views that stay valid until the next one: T tokens of R requests, L wanted rows.

    A token has a position in its sequence, which only rotations and learned embeddings read, and a row in each cache,
    where its keys and values are stored and from which attention looks back. Rows of a request are counted from 0
    through its blocks. In cache group 0, which keeps everything, row and position are the same number except in a tree,
    where tokens of one position are in several rows. A group that drops rows has fewer (docs/cache-policy.md).

    input_ids, positions: [T]; slot_mapping: [T], row % block_size of the row's block, which starts at block ·
    block_size; query_starts: [R + 1], indices of tokens; context_lens: [R], rows in the cache with this step's, which
    are the last; block_tables: [R, B], blocks by row // block_size; logit_rows: [L], indices of tokens; all int32.
    tree_masks: [T], int64, 0 outside of a tree: bit d of a token's mask hides the row d before its own. The visible
    rows count as if they were consecutive, also for windows, so a token of a tree gets the same bits as at the end of
    the chain that leads to it. Only the 63 rows before a token can be hidden from it.
    sides: the side outputs that the step is to leave. hidden: [T, width] in fp32, for engines that read hidden states.
    adapter_of_token: [T], 0 for none or 1 + the slot of the token's adapter, and
    adapter_of_logit_row: [L], the same for the wanted rows; None if no token has one. state_slots: [R], int32, the slot
    of each request's states, for engines with states; a request's first tokens start from zero states. group_slots: [G,
    T], group_tables: [G, R, B], group_lens: [G, R], the slot_mapping, block_tables and context_lens of cache groups 1
    and up, for engines whose layers do not all keep everything; entries of released blocks are undefined. None: those
    of group 0 apply to all.
    """

    input_ids: Ints
    positions: Ints
    slot_mapping: Ints
    query_starts: Ints
    context_lens: Ints
    block_tables: Ints
    logit_rows: Ints
    tree_masks: Masks
    sides: tuple[str, ...] = ()
    hidden: npt.NDArray[np.float32] | None = None
    adapter_of_token: Ints | None = None
    adapter_of_logit_row: Ints | None = None
    state_slots: Ints | None = None
    group_slots: Ints | None = None
    group_tables: Ints | None = None
    group_lens: Ints | None = None

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.int32 | np.int64 | np.float32]]]:
        """The present arrays by name."""
        for name in STEP_ARRAYS:
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def copied(self) -> "Step":
        """A copy, whose arrays later steps do not overwrite."""
        arrays: dict[str, Any] = {name: value.copy() for name, value in self.arrays()}
        return replace(self, **arrays)

    def inputs(self) -> Iterator[tuple[str, npt.NDArray[np.int32 | np.int64 | np.float32]]]:
        """The present arrays by their names in kernels and graphs."""
        for name, group, values in self.inputs_by_group():
            yield group_input(name, group), values

    def inputs_by_group(self) -> Iterator[tuple[str, int, npt.NDArray[np.int32 | np.int64 | np.float32]]]:
        """The present arrays: the name that is the same in all cache groups, the group, and the values."""
        for name, value in self.arrays():
            if name not in _OF_GROUPS:
                yield name, 0, value
            else:
                for group, own in enumerate(value, 1):
                    yield _OF_GROUPS[name], group, own

    def for_groups(self, counts: Sequence[int]) -> "Step":
        """Return the step with tables for the groups after the first. counts: number of their blocks."""
        if not counts or self.group_tables is not None:
            return self
        if self.block_tables.max() >= min(counts):
            raise ValueError(f"a step without tables of groups names blocks that the groups of {counts} do not have")
        of_first = self.slot_mapping, self.block_tables, self.context_lens
        slots, tables, lens = (np.repeat(array[None], len(counts), 0) for array in of_first)
        return replace(self, group_slots=slots, group_tables=tables, group_lens=lens)


_OF_GROUPS = dict(zip(("group_slots", "group_tables", "group_lens"), GROUP_INPUTS, strict=True))
STEP_ARRAYS = tuple(field.name for field in fields(Step) if field.name != "sides")


def input_names(groups: int) -> set[str]:
    """The names of all inputs that steps may have, with `groups` cache groups after the first."""
    of_groups = {group_input(name, 1 + group) for group in range(groups) for name in GROUP_INPUTS}
    return {*STEP_ARRAYS, *of_groups} - _OF_GROUPS.keys()
