"""Read and write keys and values through a paged cache, so that a step may hold parts of many requests.

    attention(q, k, v, scale, …)  ->  kv_write(k, v, kv_cache_i_k, kv_cache_i_v, slot_mapping)
                                      paged_attention(q, kv_cache_i_k, kv_cache_i_v, query_starts, context_lens,
                                                      block_tables, scale, …, tree_masks)
    choose_keys(q, k, weights, n)     ->  kv_write of both halves of k's channels to a separate cache
                                          paged_choose_keys(q, weights, kv_cache_i_k, kv_cache_i_v, …, n, tree_masks)
A layer whose cache keeps less than the whole sequence (docs/cache-policy.md) reads slot_mapping_g and block_tables_g
instead; if its rows are not positions, also context_lens_g.
With `kv_cache=FORMAT:recent=N`, a layer that reads older rows, other than pinned ones, also writes k and v to a second
pair of caches, in a group that keeps the nearest N rows, and paged_attention reads the last N rows there. Where the
layer's own rows are not positions, it takes the number of rows there from context_lens.
The first rewrite declares the step's inputs and narrows ids and positions to int32; each attention is one more.
Must have: keys and values of exactly the step's tokens. Every attention must be paged, or the build fails, unless
allow_fallback names paged_attention: such a graph is right for one whole sequence a step only.
Numerics: exact, since the caches have the activations' dtype (cast_kv_cache changes it if kv_dtype asks).
Source: Kwon et al. 2023, "Efficient memory management for LLM serving with PagedAttention".
"""

import torch
from torch import Tensor, fx

from llmc.errors import PassError
from llmc.formats.cache_format import exact_rows
from llmc.graph.call_arguments import call_arguments
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.graph.model_graph import CacheSpec, ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.render import render_type
from llmc.graph.stage import Stage
from llmc.graph.step_inputs import add_step_input, group_inputs, step_input
from llmc.options import BuildOptions
from llmc.passes.attention.compress_kv_cache import distance_argument
from llmc.passes.node_rules import Call, substitute
from llmc.passes.rewrite import GraphPass, Numerics
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.shapes import same_size
from llmc.program import EVERYTHING, STEP_INPUTS, CachePolicy, Nearest, group_input, newest_problem

CONTRACT = "paged_attention"
_SLICE, _UNSQUEEZE = torch.ops.aten.slice.Tensor, torch.ops.aten.unsqueeze.default
# logit_rows is read by select_logit_rows only, but the inputs of a step come before the caches.
_STEP_INPUTS: dict[str, tuple[str | int, ...]] = {
    "slot_mapping": ("T",),
    "query_starts": ("R+1",),
    "context_lens": ("R",),
    "block_tables": ("R", "B"),
    "logit_rows": ("L",),
    "tree_masks": ("T",),
}


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog) -> None:
    """Declare the step's inputs, then page every attention in order."""
    if step_input(graph, "slot_mapping") is None:
        log.step("declare the inputs of a serving step", *graph.inputs())
        attentions = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
        asked = [
            policy for node in attentions for policy in (_policy(graph, node, options), _recent(graph, node, options))
        ]
        kept = [policy for policy in asked if policy is not None and policy != EVERYTHING]
        kept += [policy.queries for policy in kept if policy.queries is not None]
        graph.policies = tuple(dict.fromkeys(kept))
        _declare_step_inputs(graph)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.choose_keys.default):
        log.step(f"page the keys of {node.name}", node)
        _page_choice(graph, node, options)
    refused: list[Refusal] = []
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default):
        refusal = _refusal(graph, node, options)
        if refusal is None:
            log.step(f"page the cache of {node.name}", node)
            _page(graph, node, options)
        else:
            log.refuse(refusal)
            refused.append(refusal)
    if refused and CONTRACT not in options.allow_fallback:
        raise PassError(
            f"{len(refused)} attention(s) cannot be paged: " + "; ".join(r.reason for r in refused),
            at=", ".join(r.node.name for r in refused),
            fix=f"change the model, or build with allow_fallback=('{CONTRACT}',) to run one sequence at a time",
        )


page_kv_cache = GraphPass(
    "page_kv_cache", run, Numerics.EXACT, Stage.SERVING, unproved="it adds inputs, among them the cache"
)


def _refusal(graph: ModelGraph, node: fx.Node, options: BuildOptions) -> Refusal | None:
    tokens = graph.inputs()[0].meta["val"].shape[-1]
    arguments = call_arguments(node)
    for name in ("k", "v"):
        value: Tensor = arguments[name].meta["val"]
        if not same_size(value.shape[0], tokens):
            return Refusal(
                f"{name} is {render_type(arguments[name])}, not one row for each of the step's tokens", arguments[name]
            )
    return _refuse_cuts(node, _policy(graph, node, options), _recent(graph, node, options), options.block_size)


def _refuse_cuts(node: fx.Node, policy: CachePolicy, recent: Nearest | None, block_size: int) -> Refusal | None:
    """Kernels take no distance from rows where some were dropped, and only whole blocks leave a table. Rows that are
    also kept exact must stay."""
    if not policy.drops_rows:
        return None
    distance = distance_argument(node)
    if distance is not None:
        return Refusal(f"{policy.shown} drops rows, but {distance} count how far back a key is", node)
    problem = policy.cut_problem(block_size)
    if problem is not None:
        return Refusal(f"{policy.shown} {problem[0]}", node)
    dropped = None if recent is None else newest_problem(policy, recent.window or 0, block_size)
    return None if dropped is None else Refusal(dropped[0], node)


def _page(graph: ModelGraph, node: fx.Node, options: BuildOptions) -> None:
    arguments = call_arguments(node)
    k, v = arguments["k"], arguments["v"]
    kv_heads, head_dim = (int(size) for size in k.meta["val"].shape[1:])
    policy = _policy(graph, node, options)
    group = 0 if policy == EVERYTHING else 1 + graph.policies.index(policy)
    sizes = (kv_heads, head_dim, int(v.meta["val"].shape[2]))
    caches = _add_caches(graph, sizes, options.block_size, group)
    slots, *places, masks = _step(graph, group)
    if arguments["keeps"] is not None:
        visible = policy.visible
        arguments |= {"window": visible.window, "chunk": visible.chunk, "pinned": visible.pinned or None}
    scoring = [arguments[n] for n in ("scale", "window", "softcap", "sinks")]
    others = ("slopes", "chunk", "latent", "bias", "chosen", "pinned")
    named = {name: arguments[name] for name in others if arguments.get(name) not in (None, False)}
    recent, write = _recent(graph, node, options), torch.ops.llmc.kv_write.default
    with graph.graph.inserting_before(node):
        graph.graph.call_function(write, (k, v, *caches, slots))
    if recent is not None:
        group = 1 + graph.policies.index(recent)
        exact = _add_caches(graph, sizes, options.block_size, group)
        slots, _, lens, tables, _ = _step(graph, group)
        with graph.graph.inserting_before(node):
            graph.graph.call_function(write, (k, v, *exact, slots))
        named |= dict(zip(("recent_k", "recent_v"), exact, strict=True))
        named |= {"recent_tables": tables, "recent": recent.window}
        if policy.drops_rows:
            named["recent_lens"] = lens
            graph.exact_rows = max(graph.exact_rows, recent.window or 0)
    read = (arguments["q"], *caches, *places, *scoring)
    substitute(graph.graph, node, Call(torch.ops.llmc.paged_attention.default, read, {"tree_masks": masks, **named}))


def _page_choice(graph: ModelGraph, node: fx.Node, options: BuildOptions) -> None:
    q, k, weights, count = call_arguments(node).values()
    width = int(k.meta["val"].shape[1])
    slots, *places, masks = _step(graph, 0)
    call = graph.graph.call_function
    caches = _add_caches(graph, (1, width // 2, width - width // 2), options.block_size, 0)
    with graph.graph.inserting_before(node):
        halves = (call(_SLICE, (k, 1, start, end)) for start, end in ((0, width // 2), (width // 2, width)))
        call(torch.ops.llmc.kv_write.default, (*(call(_UNSQUEEZE, (half, 1)) for half in halves), *caches, slots))
        chosen = call(torch.ops.llmc.paged_choose_keys.default, (q, weights, *caches, *places, count, masks))
    node.replace_all_uses_with(chosen)
    graph.graph.erase_node(node)


def _policy(graph: ModelGraph, node: fx.Node, options: BuildOptions) -> CachePolicy:
    """The cache policy of a layer: the node's own, or one that keeps its visible range.

    Raises PassError for an attention that sees nothing."""
    longest, arguments = options.max_model_len or graph.info.max_positions, call_arguments(node)
    if arguments["keeps"] is not None:
        return CachePolicy.from_text(arguments["keeps"])
    sizes = (arguments["window"], arguments["chunk"])
    window, chunk = (None if size is None or (longest and size >= longest) else int(size) for size in sizes)
    try:
        return EVERYTHING if window is None and chunk is None else Nearest(window, chunk)
    except ValueError as error:
        fix = "correct it in the model's config: sliding_window, attention_chunk_size or the like"
        raise PassError(str(error), at=node.name, fix=fix) from None


def _recent(graph: ModelGraph, node: fx.Node, options: BuildOptions) -> Nearest | None:
    """The policy of a layer's newest rows, which kv_cache keeps in addition to the codes.

    None for a layer without. One that reads no older rows, except pinned ones, has only exact rows."""
    limits = (_policy(graph, node, options).visible.near, options.max_model_len or graph.info.max_positions)
    rows = exact_rows(options.kv_cache, *limits)
    return None if rows is None else Nearest(rows)


def _step(graph: ModelGraph, group: int) -> tuple[fx.Node | None, ...]:
    """The step's inputs for the slots of keys, the blocks of requests, and the masks of trees."""
    own = graph.policies[group - 1].inputs if group else ()
    names = ("slot_mapping", "query_starts", "context_lens", "block_tables", "tree_masks")
    return tuple(step_input(graph, group_input(name, group) if name in own else name) for name in names)


def _add_caches(graph: ModelGraph, sizes: tuple[int, int, int], block_size: int, group: int) -> tuple[fx.Node, fx.Node]:
    """A layer's two cache inputs; all layers of a group share one pool of N blocks. sizes: heads, channels of keys, of
    values."""
    spec = CacheSpec(len(graph.caches), *sizes, graph.info.dtype, group=group)
    blocks = group_input("N", group)
    k, v = (
        add_step_input(graph, f"kv_cache_{spec.layer}_{part}", (blocks, spec.kv_heads, block_size, dim), spec.dtype)
        for part, dim in (("k", spec.head_dim), ("v", spec.value_dim))
    )
    k.meta["cache"], v.meta["cache"] = f"{spec.layer}.k", f"{spec.layer}.v"
    graph.caches = (*graph.caches, spec)
    return k, v


def _declare_step_inputs(graph: ModelGraph) -> None:
    _narrow_indices(graph)
    for name, shape in _STEP_INPUTS.items():
        add_step_input(graph, name, shape, TORCH_DTYPES[STEP_INPUTS[name]])
    for name, of_first in group_inputs(graph).items():
        add_step_input(graph, name, _STEP_INPUTS[of_first], TORCH_DTYPES[STEP_INPUTS[of_first]])


def _narrow_indices(graph: ModelGraph) -> None:
    """Ids and positions become int32; what is computed from them, such as a position plus an offset, follows."""
    narrowed = dict.fromkeys(node for node in graph.inputs() if not node.meta["val"].is_floating_point())
    for node in narrowed:
        node.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape, dtype=torch.int32)
    for node in graph.graph.nodes:
        if node.op == "call_function" and any(n in narrowed for n in node.all_input_nodes):
            before = node.meta["val"]
            node.meta["val"] = graph.fakes.of(node)
            if isinstance(before, Tensor) and before.dtype != node.meta["val"].dtype:
                narrowed[node] = None
