"""A cache policy from outside: the first tokens of a sequence and the latest ones. Masked rows, freed by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.program import CachePolicy, Visible


@dataclass(frozen=True)
class SinksAndRecent(CachePolicy):
    """A token sees the first `sinks` tokens and the last `recent`, itself included; keys keep their positions.

    Source: Xiao et al. 2023, "Efficient streaming language models with attention sinks".
    """

    NAME: ClassVar[str] = "sinks_and_recent"
    sinks: int
    recent: int

    @property
    def visible(self) -> Visible:
        return Visible(window=self.recent, pinned=self.sinks)
