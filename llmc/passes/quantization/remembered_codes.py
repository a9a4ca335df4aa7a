"""Codes of plans that were carried out, for plans that begin alike.

GPTQ's codes of a weight follow from the schemes of all weights before it. Two candidates of mixed precision that differ
only in the output projection have all other codes in common, and the plan that is chosen was carried out before.
"""

import math
from collections.abc import Callable

from llmc.formats.schemes import Scheme
from llmc.passes.quantization.round_weight import RoundedWeight

# The rounded modules in order, each with its scheme.
History = tuple[tuple[str, Scheme], ...]
# Codes, and what is to be said of experts that saw no token.
Rounded = tuple[RoundedWeight, str | None]


class RememberedCodes:
    """The codes of the last plan and of the best plan; others are dropped, because each takes the size of the model."""

    def __init__(self) -> None:
        self._now: dict[History, Rounded] = {}
        self._last: dict[History, Rounded] = {}
        self._best: dict[History, Rounded] = {}
        self._least = math.inf

    def of(self, history: History, rounded: Callable[[], Rounded]) -> Rounded:
        """The codes of the last module in a history; `rounded` computes those that are not known."""
        known = self._known(history)
        self._now[history] = rounded() if known is None else known
        return self._now[history]

    def has(self, history: History) -> bool:
        """Whether the codes of the last module in a history are known."""
        return self._known(history) is not None

    def _known(self, history: History) -> Rounded | None:
        return next((codes[history] for codes in (self._last, self._best) if history in codes), None)

    def end_plan(self, divergence: float) -> None:
        """Record the measured divergence of the plan whose codes were requested since the last call."""
        if divergence < self._least:
            self._least, self._best = divergence, self._now
        self._last, self._now = self._now, {}
