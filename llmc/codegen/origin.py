"""Where a piece of generated code comes from, for its comments and for errors."""

from collections.abc import Sequence

from torch import fx

from llmc.errors import LoweringError
from llmc.graph.source_line import source_line
from llmc.program import Origin


def origin_of(nodes: Sequence[fx.Node]) -> Origin:
    """The origin of a launch that computes these nodes: the last one's source line and the last rewrite among them."""
    rewrites = [str(n.meta["rewrite"]) for n in nodes if n.meta.get("rewrite")]
    sources = [s for s in (source_line(n) for n in nodes) if s]
    return Origin(tuple(n.name for n in nodes), rewrites[-1] if rewrites else None, sources[-1] if sources else None)


def unsupported(node: fx.Node, problem: str, fix: str) -> LoweringError:
    """The error for a node that cannot become code; names its op and the user's source line."""
    source = source_line(node)
    place = f"node {node.name}" if source is None else f"node {node.name}, from {source}"
    return LoweringError(f"{node.target} cannot be lowered: {problem}", at=place, fix=fix)


def describe(origin: Origin) -> str:
    """Nodes, rewrite and source of a launch, for a comment: one or two lines."""
    nodes = ", ".join(origin.nodes[:6]) + (f" and {len(origin.nodes) - 6} more" if len(origin.nodes) > 6 else "")
    lines = [nodes + (f"  ({origin.rewrite})" if origin.rewrite else "")]
    return "\n".join(one_line(line) for line in [*lines, *([origin.source] if origin.source else [])])


def one_line(text: str) -> str:
    """Fit for a comment: no line break, and no backslash at the end that would continue it."""
    return " ".join(text.split()).rstrip("\\")[:160]
