"""The arguments of a call by their schema names, so that spelling does not matter."""

import functools
from typing import Any

from torch import fx
from torch._ops import OpOverload


def call_arguments(node: fx.Node) -> dict[str, Any]:
    """Return every argument of a call by schema name, with defaults filled in.

    A target without a schema (operator.getitem) has its arguments by index.
    """
    if not isinstance(node.target, OpOverload):
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    defaults = _schema_defaults(node.target)
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


def put_in_order(node: fx.Node) -> None:
    """Turn the keyword arguments of a call to an llmc:: op into positional ones, and fill in the defaults before them.

    Code that reads a node by position (golden texts, lowering) then sees one spelling. Other ops keep theirs: many of
    aten's arguments may only be given by keyword.
    """
    if not node.kwargs or not isinstance(node.target, OpOverload) or node.target.namespace != "llmc":
        return
    arguments = call_arguments(node)
    last = max(i for i, name in enumerate(arguments) if i < len(node.args) or name in node.kwargs)
    node.args = tuple(arguments.values())[: last + 1]
    node.kwargs = {}


@functools.cache
def _schema_defaults(target: OpOverload) -> dict[str, Any]:
    """Every argument of an op in order, with its default or None; reading a schema takes longer than all else here."""
    arguments = target._schema.arguments
    return {a.name: a.default_value if a.has_default_value() else None for a in arguments}
