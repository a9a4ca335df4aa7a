"""How long collectives take: against what was published, and by size and number of ranks."""

from __future__ import annotations

import pytest

from llmc.targets import GPU_TARGETS, known_targets
from llmc.targets.links import GLOO, NVLINK_3, NVLINK_4, PCIE_4, SHARED_MEMORY, Link


@pytest.mark.parametrize(
    ("link", "nbytes", "ranks", "custom", "published"),
    [
        (NVLINK_4, 512e3, 4, True, 10e-6),  # vLLM, pull request 24532
        (NVLINK_4, 512e3, 4, False, 21e-6),  # the same, NCCL
        (NVLINK_4, 2e6, 4, False, 43e-6),  # vLLM, pull request 24111, NCCL
        (SHARED_MEMORY, 8192, 2, True, 7e-6),
        (SHARED_MEMORY, 512 << 10, 2, True, 54e-6),
        (GLOO, 8192, 2, True, 218e-6),
        (GLOO, 512 << 10, 2, True, 395e-6),
    ],
)
def test_what_was_published(link: Link, nbytes: float, ranks: int, custom: bool, published: float) -> None:
    assert link.all_reduce(nbytes, ranks, custom=custom) == pytest.approx(published, rel=0.5)


def test_one_rank_needs_no_collective() -> None:
    assert NVLINK_3.all_reduce(1e6, 1) == NVLINK_3.all_gather(1e6, 1) == 0.0


def test_more_bytes_and_more_ranks_take_longer() -> None:
    for custom in (False, True):
        by_size = [NVLINK_4.all_reduce(1 << power, 4, custom=custom) for power in range(10, 30)]
        by_ranks = [NVLINK_4.all_reduce(8192, ranks, custom=custom) for ranks in range(1, 9)]
        assert by_size == sorted(by_size) and by_ranks == sorted(by_ranks)


def test_a_shot_is_for_little_and_the_ring_for_much() -> None:
    little, much = 16 << 10, 64 << 20
    assert NVLINK_4.all_reduce(little, 8) < NVLINK_4.all_reduce(little, 8, custom=False)
    assert NVLINK_4.all_reduce(much, 8) == NVLINK_4.all_reduce(much, 8, custom=False)


def test_what_every_rank_gets_moves_once_and_not_twice() -> None:
    nbytes = 1 << 30
    assert PCIE_4.all_gather(nbytes, 4) == pytest.approx(PCIE_4.all_reduce(nbytes, 4) / 2, rel=1e-3)


def test_every_target_says_what_joins_its_ranks() -> None:
    for target in known_targets():
        links = target.links
        assert links.of(2) is links.within and links.of(links.size + 1) is links.between
        assert links.between.send(1e6) > links.within.send(1e6)
    assert {target.links.within.name for target in GPU_TARGETS} >= {"NVLink 3", "NVLink 4", "PCIe 4"}
