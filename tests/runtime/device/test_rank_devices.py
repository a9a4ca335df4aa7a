"""The GPU of each rank, and what is said if there are too few."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.errors import LlmcError, OptionError, TargetError
from llmc.program import RankLayout
from llmc.runtime.device.rank_devices import most_ranks_per_device, rank_devices
from llmc.settings import settings

ENGINE = Path("e.llmc")


@pytest.fixture(autouse=True)
def _read_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LLMC_RANK_DEVICES", raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_each_rank_has_the_gpu_of_its_number() -> None:
    assert rank_devices(ENGINE, RankLayout(2, 2), 8) == (0, 1, 2, 3)
    assert rank_devices(ENGINE, RankLayout(), 1) == (0,)


@pytest.mark.parametrize(
    ("layout", "count", "problem", "fix"),
    [
        (
            RankLayout(4),
            2,
            "built for 4 GPUs, and this process sees 2",
            "or build it again with a tensor_parallel_size of 2",
        ),
        (
            RankLayout(2, 2),
            2,
            "built for 4 GPUs: 2 stages of 2 ranks, and this process sees 2",
            "a pipeline_parallel_size of 1, or let stages share GPUs: LLMC_RANK_DEVICES=0,1,0,1",
        ),
        (RankLayout(1, 3), 2, "3 stages of 1 rank,", "a pipeline_parallel_size of 2, or let .*LLMC_RANK_DEVICES=0,0,0"),
        (RankLayout(4, 2), 2, "2 stages of 4 ranks", "or build it again for 2 ranks"),
    ],
)
def test_too_few_gpus_are_an_error_with_a_fix(layout: RankLayout, count: int, problem: str, fix: str) -> None:
    with pytest.raises(TargetError, match=problem) as error:
        rank_devices(ENGINE, layout, count)
    assert re.search(fix, str(error.value.fix))


def test_stages_share_gpus_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_RANK_DEVICES", "1,0,1,0")
    devices = rank_devices(ENGINE, RankLayout(2, 2), 2)
    assert devices == (1, 0, 1, 0)
    assert most_ranks_per_device(devices) == 2
    assert most_ranks_per_device((0, 1)) == 1
    assert most_ranks_per_device((0, 1, 1)) == 2  # Not the first rank's GPU.


@pytest.mark.parametrize(
    ("named", "kind", "problem"),
    [
        ("0", OptionError, "names the GPUs of 1 rank, and the engine was built for 4 GPUs: 2 stages of 2 ranks"),
        ("0,1,0,2", TargetError, "names GPU 2, and this process sees 2"),
        ("0,1,1,1", OptionError, "names one GPU twice among the 2 ranks of stage 1"),
    ],
)
def test_named_gpus_are_checked(
    named: str, kind: type[LlmcError], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_RANK_DEVICES", named)
    with pytest.raises(kind, match=problem) as error:
        rank_devices(ENGINE, RankLayout(2, 2), 2)
    assert error.value.fix
