"""A graph as deterministic text: one line a node, with its dtype and shape in the symbols T, L, R, B and N.

%attention: float32[T, 4, 16] = llmc.attention(%q, %k, %v, 0.25)
"""

import functools
from typing import Any

import sympy
import torch
from torch import SymInt, fx
from torch._ops import OpOverload

from llmc.graph.dtype_names import torch_name
from llmc.graph.model_graph import ModelGraph
from llmc.graph.step_inputs import symbol_names
from llmc.graph.weights import Constant, Derived, Recipe, Stored


def render(graph: ModelGraph) -> str:
    """The text of a graph. Equal graphs give equal text, whatever their symbols are called."""
    names = _Names(graph.graph)
    lines = [f"stage {graph.stage.value}", *(_line(node, graph, names) for node in graph.graph.nodes)]
    return "\n".join(lines) + "\n"


def render_type(node: fx.Node) -> str:
    """The dtype and shape of a node's result, such as float32[T, 64]."""
    return _type(node.meta.get("val"), _Names(node.graph))


def _line(node: fx.Node, graph: ModelGraph, names: "_Names") -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    typed = f"%{node.name}: {_type(node.meta.get('val'), names)}"
    if node.op == "placeholder":
        recipe = graph.weights.get(node.name)
        return f"{typed} = {'input' if recipe is None else render_recipe(recipe)}"
    arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(a)}" for k, a in node.kwargs.items()]
    return f"{typed} = {op_name(node.target)}({', '.join(arguments)})"


@functools.cache
def op_name(target: Any) -> str:
    """aten.mul.Tensor as it is; the overload `default` and the module of a builtin are left out. Cached, because
    torch's ops build their names again at each call."""
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def render_recipe(recipe: Recipe) -> str:
    """A recipe as text: a stored tensor by name, a constant by shape, a derived one as the calls that make it."""
    if isinstance(recipe, Stored):
        return f"weight {recipe.name!r}"
    if isinstance(recipe, Constant):
        return f"constant {torch_name(recipe.value.dtype)}{[*recipe.value.shape]}"
    if isinstance(recipe, Derived):
        arguments = [_argument(a) for a in recipe.args] + [f"{k}={_argument(a)}" for k, a in recipe.kwargs]
        return f"{op_name(recipe.target)}({', '.join(arguments)})"
    return f"of {len(recipe.recipes)} ranks, the first: {render_recipe(recipe.recipes[0])}"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, Recipe):
        return render_recipe(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_argument(v) for v in value)}]"
    if isinstance(value, torch.dtype):
        return torch_name(value)
    return repr(value)


def _type(value: Any, names: "_Names") -> str:
    if isinstance(value, torch.Tensor):
        return f"{torch_name(value.dtype)}[{', '.join(_size(s, names) for s in value.shape)}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(_type(v, names) for v in value)})"
    if isinstance(value, SymInt):
        return _size(value, names)
    return "()" if value is None else type(value).__name__


def _size(size: int | SymInt, names: "_Names") -> str:
    return str(size) if isinstance(size, int) else names.text(size.node.expr)


class _Names:
    """Names for a graph's symbols, cached: a graph has thousands of sizes but few distinct ones, and sympy is slow."""

    def __init__(self, graph: fx.Graph) -> None:
        names = symbol_names(graph)
        self._symbols = {own: sympy.Symbol(name, integer=True, positive=True) for own, name in names.items()}
        self._texts: dict[sympy.Expr, str] = {}

    def text(self, size: sympy.Expr) -> str:
        """A size in the symbols T, L, R, B and N."""
        if size not in self._texts:
            self._texts[size] = str(size.xreplace(self._symbols))
        return self._texts[size]
