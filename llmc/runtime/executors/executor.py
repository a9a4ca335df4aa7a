"""What runs a step: the one interface between the runtime and compiled or interpreted engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from llmc.runtime.step import Step

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Best:
    """The likeliest token of each wanted row, and its logit: [L] each; overwritten by the next step."""

    tokens: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]


class Executor(Protocol):
    """An engine's weights, KV cache and code, ready to run."""

    def step(self, step: Step) -> Logits:
        """Run one step: fills the cache's slots, returns the wanted rows' logits [L, vocabulary], fp32.

        The array may be overwritten by the next step.
        """
        ...

    def copy_blocks(self, copies: Mapping[int, int]) -> None:
        """Copy blocks of the KV cache, {destination: source}, before the next step; sources are read first."""
        ...

    def close(self) -> None:
        """Free everything; no step may follow."""
        ...


@runtime_checkable
class GreedyExecutor(Executor, Protocol):
    """An executor that can choose greedily where the logits are, so that they need not travel."""

    def best(self, step: Step) -> Best:
        """Run one step like `step`, for the best tokens only."""
        ...
