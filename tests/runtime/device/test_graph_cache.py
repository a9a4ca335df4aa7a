"""Graphs: made at the second use, bounded in number and by memory."""

from __future__ import annotations

from llmc.runtime.device.graph_cache import GraphCache


def test_a_graph_is_captured_at_the_second_use_and_kept() -> None:
    captured: list[int] = []
    cache: GraphCache[int, str] = GraphCache(4, lambda: True)

    def capture(key: int) -> str:
        captured.append(key)
        return f"graph {key}"

    assert cache.get(1, capture) is None
    assert cache.get(1, capture) == "graph 1"
    assert cache.get(1, capture) == "graph 1"
    assert captured == [1]


def test_a_cleared_cache_captures_at_the_second_use_again() -> None:
    cache: GraphCache[int, int] = GraphCache(4, lambda: True)
    for key in (1, 1, 2):
        cache.get(key, lambda k: k)
    cache.clear()
    assert len(cache) == 0
    assert [cache.get(key, lambda k: -k) for key in (1, 2, 1)] == [None, None, -1]


def test_the_one_used_longest_ago_makes_room() -> None:
    cache: GraphCache[int, int] = GraphCache(2, lambda: True)
    for key in (1, 1, 2, 2, 1, 3, 3):
        cache.get(key, lambda k: k)
    assert len(cache) == 2
    assert cache.get(1, lambda k: -k) == 1
    assert cache.get(3, lambda k: -k) == 3
    assert cache.get(2, lambda k: -k) == -2, "captured anew"


def test_short_memory_stops_captures_and_gives_one_back() -> None:
    has_room = True
    cache: GraphCache[int, int] = GraphCache(8, lambda: has_room)
    for key in (1, 1, 2, 2):
        cache.get(key, lambda k: k)
    has_room = False
    assert cache.get(3, lambda k: k) is None
    assert cache.get(3, lambda k: k) is None
    assert len(cache) == 1
    assert cache.get(2, lambda k: k) == 2
