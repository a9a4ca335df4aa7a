"""Why every rank has all of a weight: what needs it together, or what cutting it would cost."""

from collections.abc import Sequence

from torch import fx

from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.render import op_name
from llmc.passes.parallel.propagate_placements import AxesClass, Placements
from llmc.passes.parallel.roles import Role

_AXES = ("rows", "columns")
# The heads' axis of the operands of attention and rotations: [tokens, heads, channels].
_HEADS = 1


def whole_matrices(
    graph: ModelGraph, placements: Placements, roles: Sequence[Role], cut: Sequence[AxesClass], ranks: int
) -> list[Refusal]:
    """The matrices without a split axis, in the order of the graph, each with the reason after a colon."""
    barred: dict[AxesClass, Role] = {}
    for role in roles:
        for axes in role.barred:
            barred.setdefault(axes, role)
    refusals = []
    for node in graph.weight_nodes():
        shape = tuple(node.meta["val"].shape)
        classes = [placements.find(node, axis) for axis in range(len(shape))]
        if len(shape) > 1 and not any(class_ in cut for class_ in classes):
            sizes = " × ".join(map(str, shape))
            why = _why(shape, classes, barred)
            refusals.append(Refusal(f"{node.name} ({sizes}) stays whole on each of {ranks} ranks: {why}", node))
    return refusals


def reason_of(node: fx.Node, refusals: Sequence[str]) -> str | None:
    """The reason that `whole_matrices` gave for a weight, if any."""
    reasons = (refusal for refusal in refusals if refusal.startswith(f"{node.name} ("))
    return next((reason.partition(" ranks: ")[2] for reason in reasons), None)


def _why(shape: Sequence[int], classes: Sequence[AxesClass | None], barred: dict[AxesClass, Role]) -> str:
    for axis, (size, axes) in enumerate(zip(shape, classes, strict=True)):
        if axes is None or axes not in barred:
            continue
        role = barred[axes]
        if axis == 0 and _is_one_head(role, axes):
            return "it is a single head, fewer than ranks, and each rank's query heads read all of it"
        name = op_name(role.node.target) if role.node.op == "call_function" else "what the model returns"
        return f"{name} needs all {size} of its {_AXES[min(axis, 1)]} together"
    return "exchanging parts between ranks would take longer than reading the whole weight"


def _is_one_head(role: Role, axes: AxesClass) -> bool:
    """Whether the op that needs a class whole needs the channels of one head."""
    values = [operand.meta["val"] for operand, wanted in role.gathers if wanted is axes]
    return bool(values) and all(value.dim() == 3 and value.shape[_HEADS] == 1 for value in values)
