"""Check the contracts of canonicalization: the ops that must remain, and the layout of tensors.

    attention, norm, embedding, linear, pointwise: every op is one of the stage's
    rope: every cosine and sine of rotary angles goes into llmc.rope
    layout: the token axis comes first and stays whole: nothing is cut, joined or summed up along it, since a step holds
        the tokens of many requests
Changes nothing. Raises PassError for remaining ops, with the source line and the refusals that explain them. The
contracts rope, linear and pointwise may be waived by name in allow_fallback: the graph still runs, but slower.
"""

from typing import Any

import torch
from torch import SymInt, fx

from llmc.errors import PassError
from llmc.graph.fake_value import describe
from llmc.graph.model_graph import ModelGraph
from llmc.graph.propagate import token_count
from llmc.graph.render import op_name
from llmc.graph.source_line import source_line
from llmc.graph.stage import Stage
from llmc.graph.verify import fallback_ops, legal_ops
from llmc.options import BuildOptions
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import same_size

aten = torch.ops.aten

_CONTRACTS: dict[str, frozenset[Any]] = {
    "attention": frozenset(
        {
            aten.softmax.int,
            aten._safe_softmax.default,
            aten.scaled_dot_product_attention.default,
            aten.view_as_complex.default,
        }
    ),
    "linear": fallback_ops({"linear"}) | {aten.einsum.default},
    "norm": frozenset({aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default}),
    "embedding": frozenset({aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}),
}


def _run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    legal = legal_ops(Stage.CANONICAL) | fallback_ops(options.allow_fallback)
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    left = [n for n in calls if n.target not in legal and not isinstance(n.meta["val"], SymInt)]
    if left:
        # A leftover softmax explains more than the mask that was built for it.
        named = ((name, n) for name, ops in _CONTRACTS.items() for n in left if n.target in ops)
        name, node = next(named, ("pointwise", left[0]))
        raise _missed(name, node, f"{op_name(node.target)} is not part of a form that llmc knows", len(left), log)
    if "rope" not in options.allow_fallback:
        _check_rope(calls, log)
    _check_layout(graph, calls, log)


def _check_rope(calls: list[fx.Node], log: RewriteLog) -> None:
    angles = [n for n in calls if n.target is torch.ops.llmc.rope_angles.default]
    halves = [half for n in angles for half in n.users]
    # The other way around is the sine of the negative angle.
    halves += [u for half in halves for u in half.users if u.target is aten.neg.default]
    loose = [
        u for half in halves for u in half.users if u.target is not torch.ops.llmc.rope.default and u not in halves
    ]
    if loose:
        raise _missed("rope", loose[0], f"{op_name(loose[0].target)} uses rotary angles by itself", len(loose), log)


def _check_layout(graph: ModelGraph, calls: list[fx.Node], log: RewriteLog) -> None:
    tokens = token_count(graph)
    of_step = set(graph.inputs())
    for node in calls:
        if of_step.isdisjoint(node.all_input_nodes):
            continue
        of_step.add(node)
        if node.target is aten.cumsum.default and node.args[1] % node.meta["val"].dim() == 0:
            raise _missed("layout", node, f"{op_name(node.target)} works across tokens", 1, log)
        value = node.meta["val"]
        for result in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(result, torch.Tensor) or not _is_token_major(result, tokens):
                raise _missed("layout", node, f"{describe(result)} does not have all tokens as its first axis", 1, log)


def _is_token_major(value: torch.Tensor, tokens: SymInt) -> bool:
    first, *rest = value.shape or (1,)
    return same_size(first, tokens) and not any(isinstance(s, SymInt) for s in rest)


def _missed(contract: str, node: fx.Node, problem: str, count: int, log: RewriteLog) -> PassError:
    source = source_line(node)
    history = log.history()
    reasons = [r for r in history if r.source is not None and r.source == source] or list(history)
    because = "".join(f"\n  refused: {r.reason} (at {r.node})" for r in reasons[:4])
    more = f" ({count} such ops)" if count > 1 else ""
    may_stay = contract == "rope" or node.target in fallback_ops({contract})
    can = f", or build with allow_fallback=({contract!r},)" if may_stay else ""
    return PassError(
        f"the contract {contract!r} is missed: {problem}{more}{because}",
        at=source or node.format_node(),
        fix=f"write it in a form that llmc knows, rewrite it by your own pass (docs/custom-passes.md){can}",
    )


check_canonical = GraphPass("check_canonical", _run, Numerics.EXACT, Stage.CANONICAL, unproved="it changes nothing")
