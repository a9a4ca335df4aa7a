"""Checks of paged attention whose newest rows are in other caches than the rows before them."""

from torch import fx

from llmc.codegen.call import arguments_of
from llmc.graph.refusal import Refusal


def refuse_newest_rows(node: fx.Node) -> Refusal | None:
    """Return why a node's newest rows cannot be in other caches; None if they can, or are not."""
    arguments = arguments_of(node)
    recent, window, pinned = (arguments.get(name) for name in ("recent", "window", "pinned"))
    if recent is None:
        return None
    if arguments["cache_format"] is None:
        return Refusal(f"recent={recent} needs caches of codes, and this one has none", node)
    if arguments["chunk"] is not None and pinned is not None:
        return Refusal("the newest rows are apart, and both a chunk and pinned rows say which are seen", node)
    if pinned is not None and window is not None and window < recent:
        reason = f"pinned rows between the window of {window} and the newest {recent} would be in neither cache"
        return Refusal(reason, node)
    return None
