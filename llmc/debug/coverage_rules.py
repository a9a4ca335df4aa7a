"""What the pipeline should reach: how each kind of operation is recognised once it is done, and while it is left over.

Everything is read off the graph. A rule names the passes whose refusals explain what it finds left over.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.stage import Stage
from llmc.graph.step_inputs import has_selected_logits
from llmc.options import BuildOptions
from llmc.passes.uses import DATA_MOVEMENT

aten, ops = torch.ops.aten, torch.ops.llmc

CANONICAL_STAGES = frozenset({Stage.CAPTURED, Stage.CANONICAL})
SERVING_STAGES = frozenset({Stage.SERVING, Stage.OPTIMIZED})

_ATTENTION = frozenset({aten.softmax.int, aten._softmax.default, aten._safe_softmax.default})
_SDPA = aten.scaled_dot_product_attention.default
_PRODUCTS = frozenset({aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default, aten.bmm.default})
_ACTIVATIONS = frozenset({aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default})

# A norm or an attention that is written out is no wider than this many ops.
_NEIGHBOURHOOD = 8


@dataclass(frozen=True)
class CoverageRule:
    """what, verb: as in "6 of 6 attentions paged". done: the ops that show one each. left: the nodes that do not.

    passes: whose refusals explain what is left. stages: of the graphs that it is read off; the last one counts.
    reach: how many uses a refusal's node may be away from what it explains. is_wanted: whether the rule is about a
    graph at all.
    """

    what: str
    verb: str
    passes: tuple[str, ...]
    stages: frozenset[Stage]
    done: Callable[[ModelGraph], int]
    left: Callable[[ModelGraph], list[fx.Node]]
    reach: int = _NEIGHBOURHOOD
    is_wanted: Callable[[ModelGraph, BuildOptions], bool] = lambda graph, options: True


def count_of(*targets: object) -> Callable[[ModelGraph], int]:
    """How many calls of these ops a graph has."""
    return lambda graph: len(all_of(*targets)(graph))


def all_of(*targets: object) -> Callable[[ModelGraph], list[fx.Node]]:
    """The calls of these ops, in graph order."""
    wanted = frozenset(targets)
    return lambda graph: [n for n in calls(graph) if n.target in wanted]


def calls(graph: ModelGraph) -> Iterable[fx.Node]:
    """The nodes that compute."""
    return (n for n in graph.graph.nodes if n.op == "call_function")


def _attentions(graph: ModelGraph) -> list[fx.Node]:
    """SDPA, and softmaxes whose result weighs something in a product: not those of a router."""
    return [
        n
        for n in calls(graph)
        if n.target is _SDPA or (n.target in _ATTENTION and any(u.target in _PRODUCTS for u in _readers(n)))
    ]


def _readers(node: fx.Node) -> list[fx.Node]:
    """The users of a value, also of its views and casts."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if user.target in DATA_MOVEMENT else [user]
    return found


def _source(node: fx.Node) -> fx.Node:
    """What a value is a view or cast of."""
    while node.target in DATA_MOVEMENT and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _mean_squares(graph: ModelGraph, *, centered: bool) -> list[fx.Node]:
    """Means over the last axis of squares. centered: of a difference to a mean, as LayerNorm has it."""
    found = []
    for node in calls(graph):
        if node.target is not aten.mean.dim or not isinstance(node.args[0], fx.Node):
            continue
        square = _source(node.args[0])
        operands = square.all_input_nodes
        is_power = square.target is aten.pow.Tensor_Scalar and square.args[1] == 2
        is_product = square.target is aten.mul.Tensor and len(operands) == 1
        if is_power or is_product:
            base = _source(operands[0])
            is_centered = base.target is aten.sub.Tensor and any(
                _source(n).target is aten.mean.dim for n in base.all_input_nodes
            )
            if is_centered is centered:
                found.append(node)
    return found


def _rms_norms(graph: ModelGraph) -> list[fx.Node]:
    written_out = _mean_squares(graph, centered=False)
    return [*written_out, *all_of(aten.rms_norm.default)(graph), *_weighted_outside(graph, ops.rms_norm.default)]


def _layer_norms(graph: ModelGraph) -> list[fx.Node]:
    known = all_of(aten.layer_norm.default, aten.native_layer_norm.default, aten.var.correction)(graph)
    return [*_mean_squares(graph, centered=True), *known, *_weighted_outside(graph, ops.layer_norm.default)]


def _weighted_outside(graph: ModelGraph, norm: object) -> list[fx.Node]:
    """Products of a norm that has no weight with one: half of the norm is fused."""
    weights = set(graph.weight_nodes())
    found = []
    for node in calls(graph):
        operands = [_source(a) for a in node.all_input_nodes] if node.target is aten.mul.Tensor else []
        norms = [a for a in operands if a.target is norm]
        vectors = [a for a in operands if a in weights and a.meta["val"].dim() == 1]
        if norms and vectors and call_arguments(norms[0])["weight"] is None:
            found.append(node)
    return found


def _whole_norms(norm: object) -> Callable[[ModelGraph], int]:
    return lambda graph: count_of(norm)(graph) - len(_weighted_outside(graph, norm))


def _rotations(graph: ModelGraph) -> list[fx.Node]:
    """What multiplies by the cosines of rotary angles without being a rope; and cosines that are not known as such."""
    halves = [
        u
        for n in calls(graph)
        if n.target is ops.rope_angles.default
        for u in n.users
        if u.target is getitem and u.args[1] == 0
    ]
    cosines = all_of(aten.cos.default)(graph)
    return [r for h in (*halves, *cosines) for r in _angle_products(h)] + [c for c in cosines if not _angle_products(c)]


def _angle_products(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for user in node.users:
        if user.target is aten.mul.Tensor and not _is_scaling(user):
            found.append(user)
        elif user.target in DATA_MOVEMENT or user.target is aten.cat.default or _is_scaling(user):
            found += _angle_products(user)
    return found


def _is_scaling(node: fx.Node) -> bool:
    return node.target is aten.mul.Tensor and len(node.all_input_nodes) == 1


def _weight_products(graph: ModelGraph) -> list[fx.Node]:
    """Products of the step's values with a weight."""
    weights = set(graph.weight_nodes())
    return [n for n in calls(graph) if n.target in _PRODUCTS and any(_source(a) in weights for a in n.all_input_nodes)]


def _gates(graph: ModelGraph) -> list[fx.Node]:
    """Products of an activation with another tensor of its shape."""
    found = []
    for node in calls(graph):
        if node.target is not aten.mul.Tensor or len(node.all_input_nodes) != 2:
            continue
        for factor, other in (node.all_input_nodes, node.all_input_nodes[::-1]):
            is_gate = (
                factor.target in _ACTIVATIONS and other not in factor.all_input_nodes and other.op != "placeholder"
            )
            if is_gate and list(factor.meta["val"].shape) == list(other.meta["val"].shape):
                found.append(node)
                break
    return found


def _is_product(node: fx.Node) -> bool:
    return node.target in (ops.linear.default, ops.fused_linear.default)


def _gated_products(graph: ModelGraph) -> list[fx.Node]:
    gates = all_of(ops.gated_activation.default)(graph)
    return [n for n in gates if all(_is_product(_source(a)) for a in n.all_input_nodes)]


def _activated_products(graph: ModelGraph) -> list[fx.Node]:
    return [
        n
        for n in calls(graph)
        if n.target in _ACTIVATIONS | {aten.tanh.default} and n.all_input_nodes[0].target is ops.linear.default
    ]


def _is_epilogue(node: fx.Node, argument: str, without: object) -> bool:
    return node.target is ops.fused_linear.default and call_arguments(node)[argument] != without


def _residual_sums(graph: ModelGraph) -> list[fx.Node]:
    """Sums of two matrices one of which is a product that has no sum in it yet."""
    return [
        n
        for n in calls(graph)
        if n.target is aten.add.Tensor
        and len(n.all_input_nodes) == 2
        and len({str(a.meta["val"].shape) for a in n.all_input_nodes}) == 1
        and any(_is_open_product(a) for a in n.all_input_nodes)
    ]


def _is_open_product(node: fx.Node) -> bool:
    if _is_scaling(node):
        node = node.all_input_nodes[0]
    return _is_product(node) and not _is_epilogue(node, "residual", None)


def _residuals_done(graph: ModelGraph) -> int:
    inside = sum(_is_epilogue(n, "residual", None) for n in calls(graph))
    return inside + count_of(ops.add_rms_norm.default, ops.add_layer_norm.default)(graph)


def _merged_reads(graph: ModelGraph) -> int:
    """Products whose result is cut into columns: several made one."""
    return sum(_is_product(n) and sum(u.target is aten.slice.Tensor for u in n.users) > 1 for n in calls(graph))


def _shared_reads(graph: ModelGraph) -> list[fx.Node]:
    """Values that several plain products with weights read; each stands for one that could be."""
    found = []
    for node in graph.graph.nodes:
        readers = [u for u in node.users if u.target is ops.linear.default and u.args[0] is node]
        if len(readers) > 1:
            found.append(readers[-1])
    return found


def _rotated_writes(graph: ModelGraph) -> list[fx.Node]:
    writes = all_of(ops.kv_write.default)(graph)
    return [n for n in writes if _source(n.all_input_nodes[0]).target is ops.rope.default and not _is_of_latents(n)]


def _is_of_latents(write: fx.Node) -> bool:
    """Whether what is rotated is a part of each key alone, and queries are joined of parts, too."""
    readers = call_arguments(write)["k_cache"].users
    return any(u.target is ops.paged_attention.default and call_arguments(u)["latent"] for u in readers)


def _selected(graph: ModelGraph) -> int:
    return int(has_selected_logits(graph))


def _unselected(graph: ModelGraph) -> list[fx.Node]:
    return [] if has_selected_logits(graph) else [graph.logits()]


RULES: tuple[CoverageRule, ...] = (
    CoverageRule(
        "attentions",
        "recognised",
        ("fuse_sdpa_attention", "fuse_eager_attention"),
        CANONICAL_STAGES,
        count_of(ops.attention.default),
        _attentions,
    ),
    CoverageRule(
        "attentions",
        "paged",
        ("page_kv_cache",),
        SERVING_STAGES,
        count_of(ops.paged_attention.default),
        all_of(ops.attention.default),
    ),
    CoverageRule(
        "RMSNorms",
        "fused",
        ("fuse_rms_norm", "fuse_rms_norm_without_weight"),
        CANONICAL_STAGES,
        _whole_norms(ops.rms_norm.default),
        _rms_norms,
    ),
    CoverageRule(
        "LayerNorms",
        "fused",
        ("fuse_layer_norm", "fuse_layer_norm_without_bias", "fuse_layer_norm_without_weight", "fuse_layer_norm_casts"),
        CANONICAL_STAGES,
        _whole_norms(ops.layer_norm.default),
        _layer_norms,
    ),
    CoverageRule(
        "rotations by position",
        "fused",
        ("fuse_rope_angles", "simplify_repeats", "fuse_rope"),
        CANONICAL_STAGES,
        count_of(ops.rope.default),
        _rotations,
    ),
    CoverageRule(
        "gated activations",
        "fused",
        ("fuse_gated_activation",),
        CANONICAL_STAGES,
        count_of(ops.gated_activation.default),
        _gates,
    ),
    CoverageRule(
        "products with a weight",
        "recognised",
        ("fuse_linear", "make_lm_head"),
        CANONICAL_STAGES,
        count_of(ops.linear.default, ops.lm_head.default),
        _weight_products,
    ),
    CoverageRule(
        "embeddings",
        "recognised",
        ("fuse_embedding",),
        CANONICAL_STAGES,
        count_of(ops.embedding.default),
        all_of(aten.embedding.default),
    ),
    CoverageRule(
        "outputs", "limited to requested rows", ("select_logit_rows",), SERVING_STAGES, _selected, _unselected
    ),
    CoverageRule(
        "gated products",
        "made one",
        ("fuse_gated_linear",),
        SERVING_STAGES,
        count_of(ops.gated_linear.default),
        _gated_products,
    ),
    CoverageRule(
        "activations of a product",
        "fused into it",
        tuple(f"fuse_linear_{name}" for name in ("gelu", "silu", "relu", "sigmoid", "tanh")),
        SERVING_STAGES,
        lambda graph: sum(_is_epilogue(n, "activation", "identity") for n in calls(graph)),
        _activated_products,
    ),
    CoverageRule(
        "groups of products of one input", "merged", ("merge_qkv",), SERVING_STAGES, _merged_reads, _shared_reads
    ),
    CoverageRule(
        "residual sums",
        "fused",
        ("fuse_linear_residual", "fuse_add_norm"),
        SERVING_STAGES,
        _residuals_done,
        _residual_sums,
    ),
    CoverageRule(
        "rotations and cache writes",
        "made one",
        ("fuse_rope_kv_write",),
        SERVING_STAGES,
        count_of(ops.rope_kv_write.default),
        _rotated_writes,
    ),
)
