"""A rank's part of a step in stages: take over the rows of the stage before, compute, and hand over one's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from llmc.runtime.executors.executor import Logits
from llmc.runtime.loop.step import Step
from llmc.runtime.ranks.channel import Channel
from llmc.runtime.ranks.hop import Giving, Rows, Taking
from llmc.runtime.ranks.rank_memory import RankMemory

# Computes a rank's part of a step. The second argument is the memory for its result, or None if no other rank needs it.
Compute = Callable[[Step, Rows | None], None]


@dataclass(frozen=True)
class StepRows:
    """The rows that a stage takes from the one before and gives to the next. taking: from the same rank of the stage
    before; the first rank takes the logits. giving: to the same rank of the next stage; the first one of the last stage
    gives to the first of all. None for a rank without that neighbour."""

    memory: RankMemory
    rank: int
    taking: Taking | None
    giving: Giving | None

    @staticmethod
    def between(
        memory: RankMemory, rank: int, before: Channel | None, behind: Channel | None, *, is_shared: bool = True
    ) -> "StepRows":
        """The row exchange of a rank with connections to its neighbours. is_shared: whether they share memory."""

        def place(number: int, nbytes: int) -> memoryview:
            return memory.taken(number, rank, nbytes).data

        taking = None if before is None else Taking(before, None if is_shared else place)
        giving = None if behind is None else Giving(behind, shares_memory=is_shared)
        return StepRows(memory, rank, taking, giving)

    def run(self, compute: Compute, step: Step, number: int) -> None:
        """Run this rank's part of a step. Steps run in the order in which the first rank announced them.

        Does nothing if the rows of the rank before do not arrive: a rank is lost, or the first one gave up the step.

        Args:
            compute: Computes the part, and writes its result to the memory that it is given.
            step: The step, without the rows of the stage before.
            number: The step's number in that order.

        Raises:
            BaseException: `compute` raised it. Only the first rank passes rows on then.
        """
        if self.taking is not None and self.rank:
            if not self.taking.take(number):
                return
            step = replace(step, hidden=self.memory.rows(number, self.rank, len(step.input_ids)))
        output = self._output(step, number)
        try:
            compute(step, output)
        except BaseException:
            # The first rank continues after an interrupt and ignores the step's result, but other ranks wait for its
            # rows. Another rank ends, and its memory holds no result.
            if self.rank == 0:
                self._end(number, output)
            raise
        self._end(number, output)

    def give_logits(self, logits: Callable[[int, int], Logits], first: int, count: int, number: int) -> None:
        """Give the first rank rows of the last step's logits, as a step of its own number.

        Args:
            logits: Returns rows of logits, [count, vocabulary], fp32, from the index of the first and their number.
                Only the rank that has them calls it.
            first: Index of the first row.
            count: Number of rows.
            number: The number of this transfer in the order of steps.
        """
        ranks = self.memory.layout.ranks
        if self.giving is not None and ranks.stage_of(self.rank) == ranks.pipeline - 1:
            place = self.memory.logits(number, count)
            place[:] = logits(first, count)
            self.giving.give(number, place)
        self.memory.ended(self.rank)[0] = number + 1

    def close(self) -> None:
        """Disconnect the neighbours."""
        for end in (self.taking, self.giving):
            if end is not None:
                end.close()

    def _end(self, number: int, output: Rows | None) -> None:
        """Count the step as finished, and pass its rows on."""
        self.memory.ended(self.rank)[0] = number + 1
        if self.giving is not None and output is not None:
            self.giving.give(number, output)

    def _output(self, step: Step, number: int) -> Rows | None:
        """The destination of the rows that are passed on."""
        ranks = self.memory.layout.ranks
        if self.giving is None:
            return None
        if ranks.stage_of(self.rank) < ranks.pipeline - 1:
            return self.memory.rows(number, self.rank + ranks.tensor, len(step.input_ids))
        return self.memory.logits(number, len(step.logit_rows))
