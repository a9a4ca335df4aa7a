"""Which ranks an engine has, and what each of them is: a stage of the model, and one of those that share it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankLayout:
    """tensor: ranks that run a stage together, each with a part of its weights. pipeline: stages, one after the other.

    A rank's number is stage · tensor + its number among those of the stage.
    """

    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Of all stages together."""
        return self.tensor * self.pipeline

    def stage_of(self, rank: int) -> int:
        """The stage that a rank runs."""
        return rank // self.tensor

    def tensor_rank_of(self, rank: int) -> int:
        """Its number among the ranks of its stage."""
        return rank % self.tensor

    def rank_of(self, stage: int, tensor_rank: int) -> int:
        """The rank that is so."""
        return stage * self.tensor + tensor_rank
