"""The machine probes measure something plausible."""

from __future__ import annotations

import pytest

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
