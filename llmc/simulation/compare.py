"""Every way to divide the ranks, under one load, and which of them is best."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from llmc.errors import LoweringError, OptionError, PassError
from llmc.program import Program, RankLayout
from llmc.simulation.divisions import Division
from llmc.simulation.load import Arrival
from llmc.simulation.pricing import Machine
from llmc.simulation.programs import stages_of
from llmc.simulation.rank_memory import rank_memory
from llmc.simulation.serve import Outcome, Refused, Served, check_fits, serve, shortage_of

# Throughputs closer than this are the same: then the faster answers decide.
_SAME = 0.02
# With how many ranks it is tried where those that there are do not do.
_MORE_RANKS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Comparison:
    """The compared divisions of a machine's ranks. outcomes: in the order of the divisions. goals: milliseconds that
    good requests stay within, by name. enough: where none serves the load, the fewest tensor ranks, of powers of two,
    with memory for it; None if that is none."""

    outcomes: tuple[Outcome, ...]
    goals: Mapping[str, float]
    enough: int | None = None

    @property
    def served(self) -> tuple[Served, ...]:
        """The divisions that can serve the load."""
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, Served))

    @property
    def best(self) -> Served | None:
        """The division with the most good requests per second, or without goals the most output tokens; among those
        about as good, the one with the lowest median time per output token."""
        most = max(map(self._worth, self.served), default=0.0)
        near = [outcome for outcome in self.served if self._worth(outcome) >= (1 - _SAME) * most]
        return min(
            near, key=lambda served: (served.percentile("tpot", 0.5), served.percentile("ttft", 0.5)), default=None
        )

    def _worth(self, served: Served) -> float:
        goodput = served.summary.goodput
        return served.summary.output_throughput if goodput is None else goodput


def compare(
    divisions: Sequence[Division],
    program_of: Callable[[RankLayout], Program],
    machine: Machine,
    load: Sequence[Arrival],
    goals: Mapping[str, float],
    progress: Callable[[Division], None] = lambda division: None,
) -> Comparison:
    """Serve the load in each way. Raises OptionError for a request that is too long for the model."""

    @cache
    def program_or_problem(layout: RankLayout) -> Program | str:
        try:
            return program_of(layout)
        except (PassError, LoweringError) as error:
            return f"{error.problem}; {error.fix}" if error.fix else error.problem

    outcomes: list[Outcome] = []
    for division in divisions:
        progress(division)
        program = program_or_problem(division.layout)
        if isinstance(program, str):
            outcomes.append(Refused(division, program))
            continue
        check_fits(program, load)
        outcomes.append(serve(program, division, machine, load, dict(goals)))
    comparison = Comparison(tuple(outcomes), goals)
    return comparison if comparison.served else replace(comparison, enough=_enough_ranks(program_of, machine))


def _enough_ranks(program_of: Callable[[RankLayout], Program], machine: Machine) -> int | None:
    for ranks in _MORE_RANKS:
        try:
            program = program_of(RankLayout(ranks))
        except (PassError, LoweringError):
            return None
        if shortage_of(program, rank_memory(program, stages_of(program), machine.memory)) is None:
            return ranks
    return None


def best_or_refuse(comparison: Comparison, machine: Machine) -> Served:
    """The best division. Raises OptionError with the reason if no division can serve the load."""
    best = comparison.best
    if best is None:
        refused = (outcome for outcome in comparison.outcomes if isinstance(outcome, Refused))
        reasons = "; ".join(f"{outcome.division}: {outcome.reason}" for outcome in refused)
        enough = comparison.enough
        more = "use more ranks" if enough is None else f"use {enough} tensor ranks, which have enough memory,"
        raise OptionError(
            f"no division of the ranks of {machine.target.name} can serve this load: {reasons}",
            at="--ranks",
            fix=f"{more} or GPUs with more memory, quantize the weights (quantize=int4), or lower max_model_len",
        )
    return best
