"""A step in parts whose requests have equally many tokens: one with all requests of a single token, and one for each
other request.

Padding to the longest request of a step then adds nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from llmc.runtime.loop.step import Ints, Step


@dataclass(frozen=True)
class StepPart:
    """A step of some of the requests. tokens: which of the whole step's it has; wanted: which of its logit rows."""

    step: Step
    tokens: Ints
    wanted: Ints


def parts_of(step: Step) -> Iterator[StepPart]:
    """Yield the parts of a step, in any order: rows of another request that a request reads were written in earlier
    steps."""
    counts = np.diff(step.query_starts)
    single = np.flatnonzero(counts == 1)
    groups = [single] if len(single) else []
    for requests in (*groups, *(np.array([r]) for r in np.flatnonzero(counts > 1))):
        yield part_of(step, requests)


def part_of(step: Step, requests: np.ndarray[tuple[int], np.dtype[np.intp]]) -> StepPart:
    """The part of a step with these requests."""
    tokens = np.concatenate([np.arange(step.query_starts[r], step.query_starts[r + 1]) for r in requests])
    counts = np.diff(step.query_starts)[requests]
    wanted = np.flatnonzero(np.isin(step.logit_rows, tokens))
    part = replace(
        step,
        input_ids=step.input_ids[tokens],
        positions=step.positions[tokens],
        slot_mapping=step.slot_mapping[tokens],
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=step.context_lens[requests],
        block_tables=step.block_tables[requests],
        logit_rows=np.searchsorted(tokens, step.logit_rows[wanted]).astype(np.int32),
        tree_masks=step.tree_masks[tokens],
        hidden=None if step.hidden is None else step.hidden[tokens],
        state_slots=None if step.state_slots is None else step.state_slots[requests],
        group_slots=None if step.group_slots is None else step.group_slots[:, tokens],
        group_tables=None if step.group_tables is None else step.group_tables[:, requests],
        group_lens=None if step.group_lens is None else step.group_lens[:, requests],
    )
    return StepPart(part, tokens.astype(np.int32), wanted.astype(np.int32))
