"""Comparison of targets: the smallest number of ranks of each that serves a load."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmc.errors import OptionError, did_you_mean
from llmc.simulation.compare import Comparison
from llmc.simulation.serve import Refused, Served

# The share of requests that must meet the goals.
_MOST_OF_THEM = 0.99
_HOUR, _MILLION = 3600.0, 1e6


@dataclass(frozen=True)
class Fleet:
    """The fewest ranks of a target that serve the load. price: the price of one rank for an hour; None if it was not
    given."""

    target: str
    ranks: int
    served: Served
    price: float | None = None

    @property
    def price_an_hour(self) -> float | None:
        """Price per hour of all ranks."""
        return None if self.price is None else self.price * self.ranks

    @property
    def price_of_a_million(self) -> float | None:
        """Price of a million output tokens at the load's own throughput."""
        hourly, throughput = self.price_an_hour, self.served.summary.output_throughput
        return None if hourly is None or throughput == 0 else hourly / (throughput * _HOUR) * _MILLION


@dataclass(frozen=True)
class NoFleet:
    """A target that fails even with `ranks` serve the load, and why."""

    target: str
    ranks: int
    reason: str


def smallest_fleet(target: str, rent: Callable[[int], Comparison], most: int, price: float | None) -> Fleet | NoFleet:
    """Ranks are doubled until they serve the load. rent: what a number of them does."""
    tried, reason, ranks = 0, "", 1
    while ranks <= most:
        try:
            comparison = rent(ranks)
        except OptionError as error:
            # An engine of several ranks runs only on multiples of their number.
            ranks, reason = 2 * ranks, reason or error.problem
            continue
        best = comparison.best
        if best is not None and serves_well(best, comparison.goals):
            return Fleet(target, ranks, best, price)
        tried, reason, ranks = ranks, _why_not(comparison), 2 * ranks
    return NoFleet(target, tried or most, reason)


def serves_well(served: Served, goals: Mapping[str, float]) -> bool:
    """Whether nearly all requests meet the goals."""
    summary = served.summary
    if not goals or summary.goodput is None:
        return True
    return summary.goodput * summary.duration >= _MOST_OF_THEM * summary.completed


def by_size(fleets: Sequence[Fleet]) -> list[Fleet]:
    """The smallest first; of the same size the cheapest, then those without a price, the fastest first."""

    def order(fleet: Fleet) -> tuple[int, float, float]:
        price = math.inf if fleet.price is None else fleet.price
        return fleet.ranks, price, -fleet.served.summary.output_throughput

    return sorted(fleets, key=order)


def parse_prices(texts: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """Prices of one rank for an hour, by target: TARGET=PRICE. Raises OptionError."""
    prices: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not equals or not 0 < price < math.inf:
            raise OptionError(
                f"{text!r} is not a price", at=f"--price {text}", fix="give TARGET=PRICE, such as h100=2.5"
            )
        if name not in targets:
            raise OptionError(
                f"{name!r} is not among the targets",
                at=f"--price {text}",
                fix=f"{did_you_mean(name, targets)}targets: {', '.join(targets)}",
            )
        prices[name] = price
    return prices


def _why_not(comparison: Comparison) -> str:
    best = comparison.best
    if best is None:
        return next(outcome.reason for outcome in comparison.outcomes if isinstance(outcome, Refused))
    good = (best.summary.goodput or 0.0) * best.summary.duration / max(1, best.summary.completed)
    return f"{good:.0%} of the requests meet the goals"
