"""Targets beside each other: the fewest ranks that serve a load, in order, with what they cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.errors import OptionError
from llmc.frontends.capture import capture
from llmc.options import parse_options
from llmc.passes.pipeline import default
from llmc.program import RankLayout
from llmc.simulation.compare import Comparison
from llmc.simulation.divisions import Division
from llmc.simulation.fleets import Fleet, NoFleet, by_size, parse_prices, smallest_fleet
from llmc.simulation.load import Arrival
from llmc.simulation.pricing import Machine
from llmc.simulation.rent import rent_for_model
from llmc.simulation.serve import Refused
from llmc.targets import gpu_target
from tests.cli.command import assert_user_error, llmc

MODEL = Path(__file__).parents[2] / "examples" / "models" / "bard-6m"
LOAD = tuple(Arrival(0.0005 * index, 60, 8) for index in range(30))
Rent = Callable[[int], Comparison]


@pytest.fixture(scope="module")
def rent() -> Rent:
    """Of H100s, one of which does."""
    options = parse_options({"max_model_len": 128, "max_sequences": 8})
    captured, gpu = capture(MODEL, options, may_lack_weights=True), gpu_target("h100")
    return rent_for_model(captured, default(), options, Machine(gpu, gpu.memory_bytes), LOAD, {})


def refusing(rent: Rent, below: int) -> Rent:
    """Fewer ranks do not hold the model."""
    too_few = Comparison((Refused(Division(RankLayout(), 1), "needs 142 GB a rank of 80"),), {})
    return lambda ranks: rent(1) if ranks >= below else too_few


def test_ranks_are_doubled_until_they_serve(rent: Rent) -> None:
    fleet = smallest_fleet("h100", refusing(rent, 3), 8, 2.5)
    assert isinstance(fleet, Fleet) and fleet.ranks == 4 and fleet.price_an_hour == 10.0
    throughput = fleet.served.summary.output_throughput
    assert fleet.price_of_a_million == pytest.approx(10.0 / 3600 / throughput * 1e6)
    assert smallest_fleet("h100", refusing(rent, 9), 8, None) == NoFleet("h100", 8, "needs 142 GB a rank of 80")


def test_goals_count(rent: Rent) -> None:
    """Of one rank none of the requests meets them, of two all."""
    single = rent(1)
    (served,) = single.served

    def with_goals(ranks: int) -> Comparison:
        good = single.best.summary.request_throughput if single.best is not None and ranks > 1 else 0.0
        return Comparison((replace(served, summary=replace(served.summary, goodput=good)),), {"ttft": 1.0})

    fleet = smallest_fleet("h100", with_goals, 8, None)
    assert isinstance(fleet, Fleet) and fleet.ranks == 2
    missing = smallest_fleet("h100", with_goals, 1, None)
    assert isinstance(missing, NoFleet) and missing.reason == "0% of the requests meet the goals"


def test_the_smallest_comes_first_then_the_cheapest(rent: Rent) -> None:
    served = smallest_fleet("a", rent, 1, None)
    assert isinstance(served, Fleet)
    fleets = [
        Fleet(name, ranks, served.served, price)
        for name, ranks, price in (("a", 2, 1.0), ("b", 1, None), ("c", 1, 3.0))
    ]
    assert [fleet.target for fleet in by_size(fleets)] == ["c", "b", "a"]


@pytest.mark.parametrize(
    "text, problem", [("h100", "not a price"), ("h100=-1", "not a price"), ("h200=1", "not among the targets")]
)
def test_prices_that_are_none(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        parse_prices([text], ["h100", "a100"])


def test_simulate_puts_targets_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    file = tmp_path / "figures.json"
    asked = ("simulate", MODEL, "--num-prompts", "4", "--ranks", "2", "--target", "a100, h100")
    outcome = llmc(*asked, "--price", "a100=1.5", "--json", file)
    assert outcome.code == 0, outcome.err
    assert "price an hour" in outcome.out and outcome.out.index("a100") < outcome.out.index("h100")
    ranked = json.loads(file.read_text())["fleets"]
    assert [(fleet["target"], fleet["ranks"]) for fleet in ranked] == [("a100", 1), ("h100", 1)]
    assert ranked[0]["price_an_hour"] == 1.5 and ranked[1]["price_an_hour"] is None
    assert_user_error(llmc(*asked, "--price", "l4=1"), "'l4' is not among the targets")
    assert_user_error(llmc(*asked, "--plot", tmp_path / "a.png"), "a plot shows one target only")
