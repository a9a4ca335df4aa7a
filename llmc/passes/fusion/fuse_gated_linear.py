"""Make a gated MLP's two products and its activation one.

    gated_activation(linear(x, gate, b), linear(x, up, c), act)  ->  gated_linear(x, [gate; up], [b; c], act)
    gated_activation(y[:, :n], y[:, n:], act), y = linear(x, w)  ->  gated_linear(x, w, bias, act)
Must have: both products of the same x, with a bias or both without, used for nothing else; weights of one dtype and
shape used nowhere else; halves of one product in the order gate, up.
Numerics: reorder, since gate and up are not rounded in between. Saves writing and reading 2·n channels a token.
"""

from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import fx

from llmc.graph.refusal import Refused
from llmc.graph.stage import Stage
from llmc.passes.fusion.merged_weight import check_stackable, stack_rows
from llmc.passes.match import Match
from llmc.passes.pattern import Weight, either
from llmc.passes.rewrite import Numerics, Rewrite
from llmc.passes.uses import used_only_by

aten = torch.ops.aten
_linear = torch.ops.llmc.linear.default
_gated = torch.ops.llmc.gated_activation.default


def two_products(
    x: Any, gate: Weight, up: Weight, gate_bias: Weight | None, up_bias: Weight | None, activation: Any
) -> Any:
    """Gate and up with their own weights."""
    return _gated(_linear(x, gate, gate_bias), _linear(x, up, up_bias), activation)


def halves_by_slices(
    x: Any, weight: Any, bias: Any, activation: Any, start: Any, middle: Any, second: Any, end: Any
) -> Any:
    """Match one product that is cut into halves by slices, as normalize_ops leaves it."""
    y = _linear(x, weight, bias)
    return _gated(aten.slice.Tensor(y, -1, start, middle), aten.slice.Tensor(y, -1, second, end), activation)


def halves_by_split(x: Any, weight: Any, bias: Any, activation: Any, sizes: Any, gate_index: Any, up_index: Any) -> Any:
    """Match one product that is cut into halves by torch.split."""
    y = _linear(x, weight, bias)
    parts = either(aten.split_with_sizes.default(y, sizes, -1), aten.split.Tensor(y, sizes, -1))
    return _gated(getitem(parts, gate_index), getitem(parts, up_index), activation)


def replacement(
    x: Any, gate: Any, up: Any, gate_bias: Any, up_bias: Any, weight: Any, bias: Any, activation: str, match: Match
) -> Any:
    """Return one product, whose weight has gate's rows and then up's."""
    if gate is not None:
        weight = _stacked(match, gate, up)
        bias = None if gate_bias is None else _stacked(match, gate_bias, up_bias)
    return torch.ops.llmc.gated_linear.default(x, weight, bias, activation)


def precondition(match: Match) -> None:
    """Refuse weights that cannot be stacked, and parts that are not the halves in order."""
    products = [node for node in match.nodes if node.target is _linear]
    if len(products) == 2:
        _check_two(match, *products)
        return
    width = products[0].meta["val"].shape[-1]
    gate, up = _columns(match, width)
    if (gate, up) != ((0, width // 2), (width // 2, width)):
        raise Refused(f"gate is columns {gate} of {width} and up {up}, not the two halves in order", products[0])
    for node in match.nodes[1:]:
        used_only_by(node, match.nodes)  # also of slices: the product would be computed twice


fuse_gated_linear = Rewrite(
    "fuse_gated_linear",
    (two_products, halves_by_slices, halves_by_split),
    replacement,
    precondition,
    numerics=Numerics.REORDER,
    stage=Stage.OPTIMIZED,
    examples=tuple(
        {
            **{"x": (2, 3), "gate": (2, 3), "up": (2, 3), "gate_bias": (2,), "up_bias": (2,), "activation": "silu"},
            **{"weight": (4, 3), "bias": (4,), "start": 0, "middle": 2, "second": 2, "end": 4},
            **{"sizes": sizes, "gate_index": 0, "up_index": 1},
        }
        for sizes in ([2, 2], 2)
    ),
)


def _check_two(match: Match, gate: fx.Node, up: fx.Node) -> None:
    biases = match.bound["gate_bias"], match.bound["up_bias"]
    if (biases[0] is None) != (biases[1] is None):
        raise Refused(f"gate has the bias {biases[0]}, up {biases[1]}", up)
    check_stackable(match.graph, [(match.bound["gate"], gate), (match.bound["up"], up)])
    if biases[0] is not None:
        check_stackable(match.graph, [(biases[0], gate), (biases[1], up)])


def _stacked(match: Match, gate: fx.Proxy, up: fx.Proxy) -> fx.Proxy:
    return fx.Proxy(stack_rows(match.graph, (gate.node, up.node)), gate.tracer)


def _columns(match: Match, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The columns of gate and up in the product."""
    if "sizes" not in match.bound:
        start, middle, second, end = (match.bound[name] for name in ("start", "middle", "second", "end"))
        return slice(start, middle).indices(width)[:2], slice(second, end).indices(width)[:2]
    sizes = match.bound["sizes"]
    ends = list(accumulate(sizes)) if isinstance(sizes, list | tuple) else [*range(sizes, width, sizes), width]
    gate, up = (match.bound[name] % len(ends) for name in ("gate_index", "up_index"))
    starts = [0, *ends]
    return (starts[gate], ends[gate]), (starts[up], ends[up])
