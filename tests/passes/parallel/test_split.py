"""Where axes are cut: heads, groups of codes, and sizes that do not divide."""

from __future__ import annotations

import pytest
from torch import fx

from llmc.passes.parallel.propagate_placements import AxesClass, Scale
from llmc.passes.parallel.split import Split, split_class

DIM = 16


def heads(count: int, kv_heads: int) -> AxesClass:
    """The channels of so many heads, each run of which reads one KV head."""
    graph = fx.Graph()
    run = count // kv_heads * DIM
    scales = (Scale(1, 1), Scale(DIM, 1), Scale(run, DIM), Scale(run, 1))
    members = {(graph.placeholder(f"x{i}"), 0): scale for i, scale in enumerate(scales)}
    return AxesClass(count * DIM, members, {run})


@pytest.mark.parametrize(
    ("count", "kv_heads", "ranks", "most", "most_kv"),
    [
        (8, 2, 2, 4, 1),  # one KV head each
        (8, 2, 4, 2, 1),  # two ranks keep each KV head
        (6, 2, 4, 2, 1),  # three query heads of a KV head on two ranks
        (12, 2, 5, 3, 1),  # two ranks for one KV head, three for the other
        (4, 2, 3, 2, 1),  # two ranks for one KV head, one for the other
        (32, 8, 3, 12, 3),
        (52, 52, 8, 7, 7),  # 52 heads over 8 ranks, vllm#2652
        (6, 6, 4, 2, 2),
        (71, 1, 2, 36, 1),
    ],
)
def test_heads_stay_with_the_kv_head_that_they_read(
    count: int, kv_heads: int, ranks: int, most: int, most_kv: int
) -> None:
    axes = heads(count, kv_heads)
    split = split_class(axes, ranks)
    assert split is not None
    run = count // kv_heads
    assert split.length == most * DIM
    assert split.of(Scale(run * DIM, 1)).length == most_kv
    seen: list[int] = []
    for start, stop in split.spans:
        own = range(start // DIM, stop // DIM)
        seen += own
        assert len({head // run for head in own}) <= most_kv
        # Local query heads read local KV heads in order: whole runs, or parts of a single one.
        assert most_kv == 1 or (start % (run * DIM) == 0 and stop % (run * DIM) == 0)
    assert seen == list(range(count))


@pytest.mark.parametrize(
    ("size", "group", "ranks", "length"),
    [
        (768, 128, 4, 256),  # vllm#28829: six groups on four ranks
        (192, 64, 2, 128),
        (256, 128, 4, 64),  # two ranks share a group's scale
        (512, 512, 2, 256),
    ],
)
def test_codes_stay_with_their_scale(size: int, group: int, ranks: int, length: int) -> None:
    graph = fx.Graph()
    members = {(graph.placeholder("codes"), 1): Scale(1, 1), (graph.placeholder("scales"), 1): Scale(group, 1)}
    split = split_class(AxesClass(size, members, {group}), ranks)
    assert split is not None
    assert split.length == length
    for start, stop in split.spans:
        assert (start % group == 0 and stop % group == 0) or start // group == (stop - 1) // group
    assert sum(stop - start for start, stop in split.spans) == size


def test_padding_is_what_no_element_stands_for() -> None:
    graph = fx.Graph()
    split = split_class(AxesClass(7, {(graph.placeholder("x"), 0): Scale(1, 1)}), 3)
    assert split == Split(((0, 3), (3, 5), (5, 7)), 3)
    assert split.padding == 2


def test_what_cannot_be_parted_is_not_split() -> None:
    graph = fx.Graph()
    assert split_class(AxesClass(64, {(graph.placeholder("x"), 0): Scale(64, 1)}), 2) is None
