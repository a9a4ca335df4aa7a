"""Simulations of one machine share what was measured of it, so that their figures can be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmc.codegen.cpp.lowering import lower
from llmc.errors import OptionError
from llmc.options import BuildOptions
from llmc.prediction.launch_cost import kind_of
from llmc.prediction.rates import KindRates, Rates, Reach
from llmc.program import Program
from llmc.simulation.recorded_rates import rates_on_record
from llmc.simulation.rent import machine_of
from llmc.targets import gpu_target, host_target
from tests.codegen.tiny_models import llama

MEASURED = Rates(2e10, {}, 1e-6, measured=True)
KIND = KindRates(1e11, (Reach(1, 0.25), Reach(8, 1.0)), pack=1e9, serial=0.5)


@pytest.fixture(scope="module")
def program() -> Program:
    return lower(llama()[0], host_target(), BuildOptions()).program


class Probe:
    """Counts how often the machine is measured; each time it is slower."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, program: Program) -> Rates:
        self.times += 1
        kinds = {kind_of(launch): KIND for launch in program.launches[: len(program.launches) // 2]}
        return replace(MEASURED, bandwidth=2e10 / self.times, kinds=kinds)


def test_a_machine_is_measured_once(program: Program, tmp_path: Path) -> None:
    probe, path = Probe(), tmp_path / "rates.json"
    first, second = (rates_on_record(path, "cpu", 2, program, probe) for _ in range(2))
    assert probe.times == 1 and first == second
    assert {kind_of(launch) for launch in program.launches} <= first.kinds.keys()


def test_kinds_that_are_not_on_record_are_added(program: Program, tmp_path: Path) -> None:
    """What is known of the others, and of the machine, stays."""
    probe, path = Probe(), tmp_path / "rates.json"
    half = replace(program, launches=program.launches[:2])
    before = rates_on_record(path, "cpu", 2, half, probe)
    rates = rates_on_record(path, "cpu", 2, program, probe)
    assert probe.times == 2 and rates.bandwidth == before.bandwidth
    assert before.kinds.items() <= rates.kinds.items()
    assert rates_on_record(path, "cpu", 2, half, probe) == rates and probe.times == 2


def test_rates_of_something_else_are_refused(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    rates_on_record(path, "cpu", 2, program, Probe())
    with pytest.raises(OptionError, match="the rates are of 2 threads of cpu, not of 1 of cpu"):
        rates_on_record(path, "cpu", 1, program, Probe())
    path.write_text("{}")
    with pytest.raises(OptionError, match="the rates cannot be read") as caught:
        rates_on_record(path, "cpu", 2, program, Probe())
    assert caught.value.at == str(path)
    with pytest.raises(OptionError, match="the rates cannot be written"):
        rates_on_record(tmp_path / "nowhere" / "rates.json", "cpu", 2, program, Probe())
    with pytest.raises(OptionError, match="no rates of h100 are measured"):
        machine_of(gpu_target("h100"), 1, recorded=path)
