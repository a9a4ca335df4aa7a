"""The state that an op carries from token to token of a sequence, as stored by executors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StateSlot:
    """One pointer to states in fp32: [max_sequences, *shape]."""

    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes per sequence."""
        return math.prod(self.shape) * 4


def state_bytes(states: Iterable[StateSlot]) -> int:
    """Bytes of all states of one sequence."""
    return sum(state.nbytes for state in states)
