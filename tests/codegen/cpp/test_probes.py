"""The machine probes measure something plausible."""

from __future__ import annotations

import pytest

from llmc.codegen.cpp.measured_rates import measured_rates
from llmc.codegen.cpp.probes import multiply_rate, read_bandwidth
from llmc.errors import LlmcError
from llmc.targets import host_target


def test_read_bandwidth_is_that_of_some_memory() -> None:
    assert 1e8 < read_bandwidth(host_target(), 2, megabytes=16) < 1e13


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_multiply_rate_is_that_of_some_processor(dtype: str) -> None:
    rate = multiply_rate(host_target(), 1, "f32" if dtype == "f32" else "bf16")
    assert 1e8 < rate < 1e13


def test_threads_that_cannot_be_had_are_an_error() -> None:
    with pytest.raises(LlmcError, match="threads cannot be started"):
        read_bandwidth(host_target(), 2_000_000_000, megabytes=1)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_rates_are_those_of_some_machine(dtype: str) -> None:
    rates = measured_rates(host_target(), 1, "F32" if dtype == "F32" else "BF16")
    assert rates.measured
    assert 1e8 < rates.bandwidth < 1e13
    assert set(rates.multiply) == {"F32", dtype}
    assert rates.pack is not None
    assert 1e6 < rates.pack < 1e13
    assert 0 <= rates.serial <= 1
    assert 0 <= rates.launch < 1e-2
