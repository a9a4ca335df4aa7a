"""Layers are found where they are the same, and only there."""

from __future__ import annotations

from pathlib import Path

from llmc.graph.graph_text import NodeText, read_graph_text
from llmc.graph.repeats import Repeat, find_repeats


def layers(count: int, odd: int | None = None, rewired: int | None = None) -> tuple[NodeText, ...]:
    """The nodes that compute, of `count` layers of five between an embedding and a head.

    odd: a layer with another number in it. rewired: a layer that adds the embedding instead of what it was given.
    """
    lines = ["stage captured", "%ids: int32[T] = input", "%cos: float32[T, 4] = input"]
    lines += [f"%layers_{i}_w: float32[4, 4] = weight 'layers.{i}.w'" for i in range(count)]
    lines.append("%embedding: float32[T, 4] = llmc.embedding(%ids)")
    x = "embedding"
    for i in range(count):
        eps = 0.5 if i == odd else 0.25
        lines += [
            f"%norm_{i}: float32[T, 4] = llmc.rms_norm(%{x}, {eps})",
            f"%linear_{i}: float32[T, 4] = llmc.linear(%norm_{i}, %layers_{i}_w)",
            f"%rope_{i}: float32[T, 4] = llmc.rope(%linear_{i}, %cos)",
            f"%neg_{i}: float32[T, 4] = aten.neg(%rope_{i})",
            f"%add_{i}: float32[T, 4] = aten.add.Tensor(%{'embedding' if i == rewired else x}, %neg_{i})",
        ]
        x = f"add_{i}"
    lines += [f"%head: float32[T, 9] = llmc.lm_head(%{x}, %layers_0_w)", "return %head"]
    graph = read_graph_text("\n".join(lines) + "\n", Path("graph.txt"))
    return tuple(node for node in graph.nodes if node.op is not None)


def test_all_layers_are_one() -> None:
    assert find_repeats(layers(6)) == (Repeat(1, 5, 6),)


def test_an_odd_layer_stands_alone() -> None:
    first, second = find_repeats(layers(7, odd=3))
    assert first == Repeat(1, 5, 3)
    norm = 1 + 5 * 3
    assert norm < second.start
    assert (second.period, second.count) == (5, 3)


def test_a_layer_wired_otherwise_is_not_one_of_them() -> None:
    """It takes two values from outside where the others take one: no repeat holds both nodes that do."""
    repeats = find_repeats(layers(8, rewired=4))
    norm, add = 1 + 5 * 4, 1 + 5 * 4 + 4
    assert not any(repeat.start <= norm and add < repeat.end for repeat in repeats)
    assert sum(repeat.count for repeat in repeats) >= 6


def test_one_layer_is_no_repeat() -> None:
    assert find_repeats(layers(1)) == ()
    assert find_repeats(()) == ()
