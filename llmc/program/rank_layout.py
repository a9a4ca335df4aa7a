"""Which ranks an engine has, and what each of them is: a stage of the model, and one of those that share it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankLayout:
    """The numbers of ranks and stages. tensor: number of ranks that run a stage together, each with a part of its
    weights. pipeline: number of consecutive stages.

    A rank's number is stage · tensor + its number among those of the stage.
    """

    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks of all stages."""
        return self.tensor * self.pipeline

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor

    def tensor_rank_of(self, rank: int) -> int:
        """Return a rank's number among the ranks of its stage."""
        return rank % self.tensor

    def behind(self, rank: int) -> int | None:
        """The rank that receives a rank's rows: the same rank of the next stage. The first rank of the last stage sends
        its logits to rank 0. None for others."""
        if self.pipeline == 1:
            return None
        if self.stage_of(rank) < self.pipeline - 1:
            return rank + self.tensor
        return None if self.tensor_rank_of(rank) else 0

    def before(self, rank: int) -> int | None:
        """The sender of the rows that a rank receives."""
        if self.pipeline == 1 or 0 < rank < self.tensor:
            return None
        return rank - self.tensor if rank else self.rank_of(self.pipeline - 1, 0)

    def rank_of(self, stage: int, tensor_rank: int) -> int:
        """The rank that is so."""
        return stage * self.tensor + tensor_rank
