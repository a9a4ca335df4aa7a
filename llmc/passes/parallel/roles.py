"""The role of each node for the classes of axes that it touches, which decides the cost of splitting them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import record_of
from llmc.passes.parallel.propagate_placements import AxesClass, Placements, rule_axes
from llmc.passes.shapes import is_one


@dataclass(frozen=True)
class Role:
    """The role of classes of axes in a node. shares: classes whose work the node divides over ranks. sums: classes that
    it sums over, so that each rank has a part of the sum. gathers: operands that it needs whole, by the class that
    would split them. takes: classes of its result that it computes whole before taking a part. squares: classes of
    `shares` whose sum of squares it needs. barred: classes that it could neither gather nor take, because they are not
    channels of rows."""

    node: fx.Node
    shares: list[AxesClass] = field(default_factory=list)
    sums: list[AxesClass] = field(default_factory=list)
    gathers: list[tuple[fx.Node, AxesClass]] = field(default_factory=list)
    takes: list[AxesClass] = field(default_factory=list)
    squares: list[AxesClass] = field(default_factory=list)
    barred: list[AxesClass] = field(default_factory=list)

    def classes(self) -> list[AxesClass]:
        """Return all classes, each once."""
        classes = (*self.shares, *self.sums, *(axes for _, axes in self.gathers), *self.takes)
        return list(dict.fromkeys(classes))


def roles(graph: ModelGraph, placements: Placements) -> list[Role]:
    """The roles of every call and of the output, in order; nodes that touch no class are left out."""
    candidates = [_role(node, placements) for node in graph.graph.nodes if node.op in ("call_function", "output")]
    return [role for role in candidates if role.classes()]


def _role(node: fx.Node, placements: Placements) -> Role:
    role, summed = Role(node), _summed(node, placements)
    results = _classes(node, placements)
    kept, seen = set(results), _repeated(node, placements)
    role.shares.extend(seen)
    for operand in dict.fromkeys(node.all_input_nodes):
        for axes in _classes(operand, placements):
            seen.add(axes)
            if axes in summed:
                _add(role.sums, axes)
            elif axes in kept and node.op != "output" and not _is_whole(node, operand, axes, placements):
                _add(role.shares, axes)
            else:
                role.gathers.append((operand, axes))
                kept.discard(axes)
    role.takes.extend(class_ for class_ in results if class_ not in kept & seen)
    moved = [*role.gathers, *((node, class_) for class_ in role.takes)]
    role.barred.extend(class_ for value, class_ in moved if not _is_channels(value, class_, placements))
    role.squares.extend(class_ for class_ in role.shares if _has_squares(node, class_, placements))
    role.barred.extend(class_ for class_ in role.squares if _in_runs(node, class_, placements))
    record = record_of(node)
    if record is not None and record.table is not None:
        table = call_arguments(node)[record.table]
        role.barred.extend(class_ for class_ in role.sums if _in_runs(table, class_, placements))
    return role


def _repeated(node: fx.Node, placements: Placements) -> set[AxesClass]:
    """The classes of axes along which `expand` repeats one element; each rank repeats it for its part."""
    if node.target is not torch.ops.aten.expand.default:
        return set()
    before, after = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    new = len(after) - len(before)
    ones = (axis for axis in range(len(after)) if axis < new or is_one(before[axis - new]))
    return {axes_class for axis in ones if (axes_class := placements.find(node, axis)) is not None}


def _summed(node: fx.Node, placements: Placements) -> set[AxesClass]:
    record = record_of(node)
    if record is None or record.axes is None:
        return set()
    rule = record.axes
    return {
        axes
        for axis, place in rule_axes(node)
        if not axis.whole and rule.is_summed(axis.letter) and (axes := placements.find(*place)) is not None
    }


def _is_whole(node: fx.Node, operand: fx.Node, axes: AxesClass, placements: Placements) -> bool:
    """Whether the op's rule needs the operand's whole axis of that class."""
    return any(
        axis.whole and place[0] is operand and placements.find(*place) is axes for axis, place in rule_axes(node)
    )


def _is_channels(node: fx.Node, axes: AxesClass, placements: Placements) -> bool:
    is_last = node.meta["val"].dim() == 2 and placements.find(node, 1) is axes
    return is_last and not _in_runs(node, axes, placements)


def _in_runs(node: fx.Node, class_: AxesClass, placements: Placements) -> bool:
    """Whether a rank's part of a class is in several places of a value."""
    axes = range(node.meta["val"].dim())
    return any(placements.scale(node, axis).runs > 1 for axis in axes if placements.find(node, axis) is class_)


def _has_squares(node: fx.Node, axes: AxesClass, placements: Placements) -> bool:
    return any(axis.squares and placements.find(*place) is axes for axis, place in rule_axes(node))


def _classes(node: fx.Node, placements: Placements) -> list[AxesClass]:
    value = node.meta.get("val")
    axes = range(value.dim()) if isinstance(value, Tensor) else range(0)
    classes = [placements.find(node, axis) for axis in axes]
    return list(dict.fromkeys(class_ for class_ in classes if class_ is not None))


def _add(classes: list[AxesClass], axes: AxesClass) -> None:
    if axes not in classes:
        classes.append(axes)


def sum_of(node: fx.Node) -> fx.Node:
    """Return the node at which the parts of a sum are added: after its only readers, as long as these compute the same
    from each part."""
    while len(node.users) == 1:
        (reader,) = node.users
        record = record_of(reader)
        if record is None or record.linear_in is None or call_arguments(reader)[record.linear_in] is not node:
            break
        node = reader
    return node


def nbytes(node: fx.Node, tokens: int) -> int:
    """Bytes of a value in a step of `tokens` tokens."""
    value = node.meta["val"]
    sizes = [size if isinstance(size, int) else tokens for size in value.shape] if isinstance(value, Tensor) else [0]
    return int(torch.tensor(sizes).prod()) * value.dtype.itemsize if isinstance(value, Tensor) else 0
