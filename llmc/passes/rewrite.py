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
    """A pattern pass, which is pure data: the runner finds and rewrites the matches.

    A pattern's parameters are wildcards. A wildcard binds a node or a constant, and the same one at each use. One that
    is annotated `Weight` binds only what is known when the engine is built; one that is annotated `float` binds only
    numbers. `either(a, b)` is a value in one of several forms. Optional arguments are filled in on both sides, dims
    compare modulo the rank, and add and mul match in both orders. A cast (`_to_copy`) also matches a value that already
    has its dtype, because export omits such casts. So one pattern serves fp32 and bf16 models.

    Args:
        name: The name of the pass.
        patterns: Functions that call torch.ops.aten.* or torch.ops.llmc.* on their parameters. They return one value,
            the root, or a tuple of it and further outputs. Names mean the same in every pattern of the pass.
        replacement: A function of any of the patterns' parameters, which are fx proxies for nodes, and None if the
            pattern that matched lacks the parameter. A parameter `match` is given the Match. It returns the value that
            replaces the root, or a tuple with one value per output, of the same dtypes and shapes.
        precondition: Sees a match before it is rewritten. A Refusal, returned or raised as Refused, is recorded and
            leaves the match alone, after the other ways in which the patterns hold at the root were tried.
        numerics: The effect on numbers.
        stage: The stage of the resulting graph; None is that of the input graph.
        shares_interior: Whether nodes between the outputs and the wildcards may also be used outside the match.
            Otherwise such a use is a refusal, except of a node that only moves data, which costs little twice.
        applies: Whether the pass is for a match at all; other matches are skipped without a refusal.
        after: The pass after which llmc.passes.extended puts this one; None is the end.
        examples: Values of wildcards for `llmc prove` that it cannot find itself: one mapping per case, by name, with a
            tensor as its shape.
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
    """A whole-graph pass.

    New nodes automatically get their fake value, the user's source line and the rewrite's number; a new placeholder
    needs its meta["val"] set. Weights are added to or removed from graph.weights. The runner removes dead code.

    Args:
        name: The name of the pass.
        run: Rewrites the graph. It calls log.step before each single rewrite, which must leave a graph that runs.
        numerics: The effect on numbers.
        stage: As in Rewrite.
        after: As in Rewrite.
        budget: For a lossy pass, the largest |Δlogit| over the logits' spread that `check_passes` accepts; None for the
            usual one.
        examples: Small graphs in which it rewrites something, for `llmc prove`.
        unproved: The reason why there are no examples.
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
