"""The kinds of passes: a Rewrite (patterns and a replacement), a GraphPass (a function over the graph), or a WeightPass
(which reads weights and may run the graph)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.stage import Stage
from llmc.options import BuildOptions
from llmc.passes.example import Example
from llmc.passes.match import Match
from llmc.passes.model_data import ModelData
from llmc.passes.rewrite_log import RewriteLog


class Numerics(Enum):
    """The effect of a pass on numbers.

    EXACT: the same bits. REORDER: the same mathematics in another order, or rounded fewer times. LOSSY: within a
    declared budget.
    """

    EXACT = "exact"
    REORDER = "reorder"
    LOSSY = "lossy"


@dataclass(frozen=True)
class Rewrite:
    """A pattern pass, pure data; the runner does the rest.

    patterns: plain functions that call torch.ops.aten.* or torch.ops.llmc.* on their parameters, and return one
        value, the root, or a tuple of it and more outputs, which others may read too. A parameter is a wildcard: it
        binds a node or a constant, and the same one each time it is used; names mean the same in every pattern of the
        pass. One annotated `Weight` binds only what is known when the engine is built, one annotated `float` only
        numbers. `either(a, b)` is a value of one of several forms. Optional arguments are filled in on both sides, dims
        compare modulo the rank, add and mul match in both orders, and a cast (`_to_copy`) also matches a value that
        has its dtype already, since export leaves such casts out. So one pattern serves fp32 and bf16 models.
    replacement: takes any of the patterns' parameters, nodes as fx proxies and constants as they are, None if the
        pattern that matched has no such parameter, and returns what takes the root's place, or a tuple with one result
        an output; dtypes and shapes must be theirs. May call several ops. A parameter `match` is given the Match.
    precondition: sees a match before it is rewritten; a Refusal, returned or raised as Refused, leaves it alone and is
        recorded, after the other ways in which the patterns hold at the root were tried.
    shares_interior: whether nodes between the outputs and the wildcards may also be used outside the match. If not,
        such a use is a refusal, except of a node that only moves data (a view, a cast), which costs little twice.
    stage: the stage of the graph that comes out; None is that of the graph that goes in.
    applies: whether the pass is for a match at all; other matches are skipped without a refusal.
    after: where llmc.passes.extended puts it: after the pass of this name; None is the end.
    examples: for `llmc prove`, which looks for values of the wildcards itself: those that it cannot find, by name, a
        tensor as its shape. One mapping a case, of all patterns that hold for it.
    """

    name: str
    patterns: tuple[Callable[..., Any], ...]
    replacement: Callable[..., Any]
    precondition: Callable[[Match], Refusal | None] | None = None
    numerics: Numerics = Numerics.REORDER
    stage: Stage | None = None
    shares_interior: bool = False
    applies: Callable[[Match], bool] | None = None
    after: str | None = None
    examples: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class GraphPass:
    """A whole-graph pass. `run` calls log.step before each single rewrite, which must leave a graph that runs.

    Nodes that it creates get their fake value, the user's source line and the rewrite's number by themselves; a new
    placeholder needs its meta["val"] set. Weights are added to or taken from graph.weights; dead code is left to the
    runner. stage, after: as in Rewrite. budget: of a lossy pass, the largest |Δlogit| over the logits' spread that
    `check_passes` lets it make; None for the usual one (debug/check_passes.py). examples: small graphs in which it
    rewrites something, for `llmc prove`. unproved: why there are none.
    """

    name: str
    run: Callable[[ModelGraph, BuildOptions, RewriteLog], None]
    numerics: Numerics = Numerics.REORDER
    stage: Stage | None = None
    after: str | None = None
    budget: float | None = None
    examples: tuple[Example, ...] = ()
    unproved: str | None = None


@dataclass(frozen=True)
class WeightPass:
    """A whole-graph pass that needs the data of weights; otherwise like GraphPass."""

    name: str
    run: Callable[[ModelGraph, BuildOptions, RewriteLog, ModelData], None]
    numerics: Numerics = Numerics.LOSSY
    stage: Stage | None = None
    after: str | None = None
    budget: float | None = None
    unproved: str | None = None


Pass = Rewrite | GraphPass | WeightPass
