"""What a step reads: the same arrays, whatever the requests in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Step:
    """One step's inputs, int32 views that stay valid until the next one: T tokens of R requests, L wanted rows.

    input_ids, positions, slot_mapping: [T]; query_starts: [R + 1]; context_lens: [R]; block_tables: [R, B];
    logit_rows: [L], indices into the tokens. sides: the side outputs that the step is to leave. hidden: [T, width] in
    fp32, of engines that read hidden states.
    """

    input_ids: Ints
    positions: Ints
    slot_mapping: Ints
    query_starts: Ints
    context_lens: Ints
    block_tables: Ints
    logit_rows: Ints
    sides: tuple[str, ...] = ()
    hidden: npt.NDArray[np.float32] | None = None

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.int32 | np.float32]]]:
        """What there is, by name."""
        for name in STEP_ARRAYS:
            value = getattr(self, name)
            if value is not None:
                yield name, value


STEP_ARRAYS = tuple(field.name for field in fields(Step) if field.name != "sides")
