"""The space that a loop runs over, and how a view is walked in it.

A space is a shape such as (T, heads, head_dim): the row axis and the axes that become the loop's dims. A value computed
in a space has its shape, or 1 in place of the last axis: the results of reductions and values derived from them.
"""

from torch import fx

from llmc.codegen.views import Dim, Value, View, Views, view_of
from llmc.graph.pointwise import reduces
from llmc.program import RowCount

Space = tuple[Dim, ...]


def space_of(node: fx.Node, views: Views, copies: frozenset[fx.Node]) -> Space:
    """The space of one node: its result's shape, or its input's if it reduces. No leading 1s."""
    if node in copies:
        return _without_leading_ones(view_of(node, views).value.shape)
    return _without_leading_ones(_source_shape(node, views) if reduces(node) else view_of(node, views).shape)


def result_view(node: fx.Node, views: Views, copies: frozenset[fx.Node]) -> View:
    """Return the view of its own result that a node's loop has: aligned with the space, with an axis of 1 that
    keepdim=False drops."""
    value = view_of(node, views).value
    whole = value.whole()
    if node not in copies and reduces(node) and len(value.shape) < len(_source_shape(node, views)):
        return View(value, 0, (*value.shape, 1), (*whole.strides, 0))
    return whole


def merged_space(a: Space, b: Space) -> Space | None:
    """The space that holds what two spaces hold; None if they have none in common."""
    if len(a) != len(b) or not a or a[:-1] != b[:-1]:
        return a if a == b else None
    if a[-1] == b[-1] or b[-1] == 1:
        return a
    return b if a[-1] == 1 else None


def strides_over(view: View, space: Space) -> tuple[int, ...]:
    """Elements from one place to the next along the row axis, then along each dim, when the view is broadcast."""
    missing = len(space) - len(view.shape)
    shape: tuple[Dim, ...] = (1,) * missing + view.shape[max(0, -missing) :]
    strides = (0,) * missing + view.strides[max(0, -missing) :]
    steps = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    row = next((i for i, d in enumerate(space) if isinstance(d, RowCount)), None)
    if row is None:
        return (0, *(steps or (0,)))
    rest = steps[:row] + steps[row + 1 :]
    return (steps[row], *(rest or (0,)))


def dims_of(space: Space) -> tuple[int, ...]:
    """The loop's dims; a space with only rows has one column."""
    return tuple(d for d in space if isinstance(d, int)) or (1,)


def reads_in_place(view: View, producer: Value, result: View, space: Space) -> bool:
    """Whether reading the view in the space gives, at each place, what the producer's loop has just computed there."""
    return view.value == producer and view.offset == 0 and strides_over(view, space) == strides_over(result, space)


def _source_shape(node: fx.Node, views: Views) -> tuple[Dim, ...]:
    return view_of(node.all_input_nodes[0], views).shape


def _without_leading_ones(shape: tuple[Dim, ...]) -> Space:
    start = next((i for i, d in enumerate(shape) if d != 1), max(len(shape) - 1, 0))
    return shape[start:]
