"""Predicted times of a program's steps, for thousands of shapes: the common part of launches is computed once."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from llmc.prediction.collectives import ALL_REDUCE, collective_seconds, is_collective
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.launch_cost import launch_cost
from llmc.prediction.launch_seconds import launch_seconds
from llmc.prediction.launch_time import predict_launch
from llmc.prediction.rates import Rates
from llmc.prediction.step_launches import is_empty
from llmc.prediction.step_shape import StepShape
from llmc.program import Launch, Limits, StepOutput
from llmc.program.rank_memory import PLACE_BYTES
from llmc.targets import GpuTarget
from llmc.targets.links import Link

_ADD_NORMS = ("add_rms_norm", "add_layer_norm")
# The key that the price of a launch depends on, apart from the numbers among its arguments.
_priced_by = attrgetter(
    "family", "dtypes", "bytes_moved", "flops", "grid", "only", "wanted", "sides", "unless", "seconds"
)
# Seconds of one launch in a step.
_Price = Callable[[Launch, StepShape], float]


@dataclass(frozen=True)
class StepPrice:
    """The predicted time of a step, by its launches. launches: those that differ, how often a step has each, and its
    price."""

    launches: tuple[tuple[Launch, int, _Price], ...]

    def seconds(self, step: StepShape) -> float:
        """Return the seconds of a greedy step."""
        return sum(
            count * price(launch, step)
            for launch, count, price in self.launches
            if launch.runs(tokens=step.tokens, logit_rows=step.logit_rows, wanted=StepOutput.BEST)
        )


def gpu_price(
    launches: Sequence[Launch], limits: Limits, ranks: int, target: GpuTarget, link: Link, *, custom: bool = True
) -> StepPrice:
    """The price of a step on a GPU: by its data sheet, plus the time per launch. ranks: that have a part of each; link:
    what joins them. custom: whether collectives of little are a single shot."""

    def price(launch: Launch, step: StepShape) -> float:
        if is_collective(launch):
            return target.launch + collective_seconds(launch, step, ranks, link, custom=custom)
        # The work of a launch without programs is done by one that follows.
        return launch_seconds(launch, step, target, limits) - (target.launch if is_empty(launch, step) else 0.0)

    def shared(launch: Launch, step: StepShape) -> float:
        whole = price(launch, step)
        # It reads two rows and writes two. With few rows, every rank normalizes all of them in the launch that sums.
        is_few = evaluate_expression(launch.bytes_moved, step.values()) / 4 <= PLACE_BYTES
        return whole if is_few else target.launch + (whole - target.launch) / ranks

    norms = _norms_of_sums(launches) if ranks > 2 else []
    others = [launch for launch in launches if not any(launch is norm for norm in norms)]
    return StepPrice((*_priced(others, price), *_priced(norms, shared)))


def cpu_price(launches: Sequence[Launch], ranks: int, rates: Rates, link: Link) -> StepPrice:
    """The price of steps on a CPU. rates: those of one rank while the others also work."""

    def price(launch: Launch, step: StepShape) -> float:
        if is_collective(launch):
            return collective_seconds(launch, step, ranks, link)
        return predict_launch(launch_cost(launch), step, rates)

    return StepPrice(_priced(launches, price))


def _norms_of_sums(launches: Sequence[Launch]) -> list[Launch]:
    """Residual sums with their norms that take in a sum over ranks: sequence parallel, where rows are many."""
    return [
        launch for reduced, launch in pairwise(launches) if reduced.family == ALL_REDUCE and launch.family in _ADD_NORMS
    ]


def _priced(launches: Sequence[Launch], price: _Price) -> tuple[tuple[Launch, int, _Price], ...]:
    """Launches that cost the same, once each: they differ in their operands and where they come from."""
    kinds: dict[object, Launch] = {}
    counts = Counter[object]()
    for launch in launches:
        numbers = tuple((n, v) for n, v in launch.arguments.items() if isinstance(v, int | float | str))
        key = (numbers, _priced_by(launch))
        kinds.setdefault(key, launch)
        counts[key] += 1
    return tuple((kinds[key], count, price) for key, count in counts.items())
