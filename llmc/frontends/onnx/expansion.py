"""How many calls a model's functions and branches make, before any is made: files can say 10¹² in a few bytes."""

from collections.abc import Iterable

from llmc.errors import CaptureError
from llmc.frontends.onnx.model import OnnxGraph, OnnxModel, OnnxNode

_MOST_CALLS = 1 << 17
_MOST_DEPTH = 16


def check_expansion(model: OnnxModel, nodes: Iterable[OnnxNode]) -> None:
    """Raise CaptureError for functions that call themselves, and for more calls than a model has layers for."""
    counted: dict[tuple[str, str, str], int] = {}

    def calls(nodes: Iterable[OnnxNode], within: tuple[tuple[str, str, str], ...]) -> int:
        return sum(1 + inner(node, within) for node in nodes)

    def inner(node: OnnxNode, within: tuple[tuple[str, str, str], ...]) -> int:
        branches = sum(calls(each.nodes, within) for each in node.attributes.values() if isinstance(each, OnnxGraph))
        key = node.function
        function = model.functions.get(key)
        if function is None:
            return branches
        if key in within or len(within) >= _MOST_DEPTH:
            problem = "calls itself" if key in within else f"lies more than {_MOST_DEPTH} deep in others"
            raise _refused(model, f"the function {node.op:.80} {problem}")
        if key not in counted:
            counted[key] = calls(function.nodes, (*within, key))
        return branches + counted[key]

    found = calls(nodes, ())
    if found > _MOST_CALLS:
        raise _refused(model, f"its functions make {found} calls, more than {_MOST_CALLS}")


def _refused(model: OnnxModel, problem: str) -> CaptureError:
    return CaptureError(
        f"the model cannot be expanded: {problem}",
        at=model.file,
        fix="export the model again, without functions of its own: onnx.inliner.inline_local_functions",
    )
