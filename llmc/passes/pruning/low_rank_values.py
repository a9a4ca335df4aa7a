"""Keep the value channels of each KV head that carry most energy, and fold the rest away, for the option `prune`.

    o(attention(q, k, v(x)))  ->  o'(attention(q, k, v'(x)));  v' = Uᵀ v,  o' = o U for each query head of a KV head
U [channels, r] are the first eigenvectors of Σ_tokens v vᵀ on calibration text, so that v' is the best form of rank r
for it: the left factor of the singular value decomposition of W_v C^{1/2}, where C is the second moment of x. The KV
cache holds r values in the place of a head's channels. One rewrite for each attention.
Must have: values that one product makes and only an attention reads; a product that is the attention's only reader;
dense weights. Numerics: lossy. The result is dense and smaller. Source: Chang et al. 2024, "Palu: KV-cache compression
with low-rank projection".
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from llmc.errors import OptionError
from llmc.formats.pruned_part import PrunedPart
from llmc.formats.pruning import Pruning
from llmc.graph.call_arguments import call_arguments
from llmc.graph.dead_code import remove_dead_code
from llmc.graph.model_graph import ModelGraph
from llmc.graph.refusal import Refusal
from llmc.graph.weights import Constant, Derived, Recipe
from llmc.options import BuildOptions
from llmc.passes.fusion.merge_qkv import merge_products
from llmc.passes.model_data import ModelData
from llmc.passes.parallel.separate_products import separate
from llmc.passes.pruning.value_paths import ValuePath, value_paths
from llmc.passes.pruning.value_ranks import value_ranks
from llmc.passes.quantization.calibration import calibration_sequences
from llmc.passes.quantization.check_quantizable import check_plans
from llmc.passes.quantization.stream import Stream
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog

_aten = torch.ops.aten


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Measure every attention on one run over the text, then fold. Raises OptionError if none can lose channels."""
    pruning = options.pruning
    if not pruning.takes_values:
        return
    apart = separate(graph, log)
    remove_dead_code(graph)
    paths, refusals = list[ValuePath](), list[Refusal]()
    for candidate in value_paths(graph):
        refusal = candidate if isinstance(candidate, Refusal) else _refusal(candidate, pruning)
        if refusal is not None:
            refusals.append(refusal)
            log.refuse(refusal)
        elif isinstance(candidate, ValuePath):
            paths.append(candidate)
    if not paths:
        raise _nothing(graph, pruning, refusals)
    stream = Stream(graph, data.source, calibration_sequences(graph, options, data))
    bases = _bases(stream, paths)
    ranks = value_ranks(pruning, [energies for energies, _ in bases])
    for path, (energies, basis), rank in zip(paths, bases, ranks, strict=True):
        kept = float(energies[:, :rank].sum() / energies.sum().clamp_min(1e-300))
        log.step(f"{rank} of {path.channels} value channels of {path.modules[0]}: {kept:.2%} of energy", path.made)
        before, channels = _parameters(path), path.channels
        _fold(graph, path, basis[:, :, :rank])
        gone, error = tuple(range(rank, channels)), math.sqrt(max(0.0, 1.0 - kept))
        part = PrunedPart(path.modules[0], "values", gone, channels, error, before, _parameters(path))
        graph.pruned = (*graph.pruned, part)
    for linears in apart:
        log.step("one product again: " + " + ".join(linear.name for linear in linears), *linears)
        merge_products(graph, linears)
    check_plans(graph, options)


low_rank_values = WeightPass("low_rank_values", run, Numerics.LOSSY, budget=3.0)


def _bases(stream: Stream, fitting: Sequence[ValuePath]) -> list[tuple[Tensor, Tensor]]:
    """The energies of each attention, [kv_heads, channels], descending, fp64, and their directions as columns,
    [kv_heads, channels, channels], fp32."""
    paths = {path.attention: path for path in fitting}
    moments: dict[fx.Node, Tensor] = {}
    for node in stream.stops(list(paths)):
        path = paths[node]
        moment = torch.zeros(path.kv_heads, path.channels, path.channels, dtype=torch.float64)
        for part in stream.parts(path.values):
            rows = part.double().transpose(0, 1)
            moment += rows.transpose(1, 2) @ rows
        moments[node] = moment
    decomposed = (torch.linalg.eigh(moments[path.attention]) for path in fitting)
    return [(values.flip(1).clamp_min(0), vectors.flip(2).float()) for values, vectors in decomposed]


def _fold(graph: ModelGraph, path: ValuePath, basis: Tensor) -> None:
    """Multiply the weights by the bases of KV heads, [kv_heads, channels, rank], and shorten what lies between."""
    kv_heads, channels, rank = basis.shape
    *inner, summed = path.weights
    back = Constant(basis.transpose(1, 2).contiguous())
    for weight in inner:  # The bias is a matrix of one column.
        columns = weight.meta["val"].shape[1] if weight.meta["val"].dim() == 2 else 1
        by_head = Derived(_aten.reshape.default, (_wide(graph.weights[weight.name]), (kv_heads, channels, columns)))
        shape = (kv_heads * rank, columns) if weight.meta["val"].dim() == 2 else (kv_heads * rank,)
        _set(graph, weight, Derived(_aten.bmm.default, (back, by_head)), shape)
    rows, group = summed.meta["val"].shape[0], path.heads // kv_heads
    by_head = Derived(_aten.reshape.default, (_wide(graph.weights[summed.name]), (rows, kv_heads, group, channels)))
    folded = Derived(_aten.matmul.default, (by_head, Constant(basis.contiguous())))
    _set(graph, summed, folded, (rows, path.heads * rank))
    sizes = {path.made: kv_heads * rank, path.values: rank, path.attention: rank, path.joined: path.heads * rank}
    for node, size in sizes.items():
        value = node.meta["val"]
        node.meta["val"] = value.new_empty((*value.shape[:-1], size))
        if node in (path.values, path.joined):
            node.args = (node.args[0], [*call_arguments(node)["shape"][:-1], size])


def _wide(recipe: Recipe) -> Derived:
    return Derived(_aten._to_copy.default, (recipe,), (("dtype", torch.float32),))


def _set(graph: ModelGraph, weight: fx.Node, recipe: Recipe, shape: tuple[int, ...]) -> None:
    """Give a weight another recipe in fp32, and that shape in its own dtype."""
    value = weight.meta["val"]
    shaped = Derived(_aten.reshape.default, (recipe, shape))
    graph.weights[weight.name] = Derived(_aten._to_copy.default, (shaped,), (("dtype", value.dtype),))
    weight.meta["val"] = value.new_empty(shape)


def _parameters(path: ValuePath) -> int:
    return sum(math.prod(node.meta["val"].shape) for node in path.weights)


def _refusal(path: ValuePath, pruning: Pruning) -> Refusal | None:
    """Return why an attention keeps its channels."""
    rule = pruning.rule_for(path.modules)
    if rule is not None and rule.scheme is None:
        reason = f"{path.modules[0]} keeps its value channels: {rule.pattern}=none"
        return Refusal(reason, path.attention, is_asked=True)
    if pruning.value_rank > path.channels:
        return Refusal(f"{path.modules[0]} has {path.channels} channels a head, not {pruning.value_rank}", path.made)
    return None


def _nothing(graph: ModelGraph, pruning: Pruning, refusals: Sequence[Refusal]) -> OptionError:
    reason = refusals[0].reason if refusals else f"{graph.info.name} has no attention"
    option = f"value_rank={pruning.value_rank}" if pruning.value_rank else f"values={pruning.values:g}"
    return OptionError(
        f"no value channel can be taken out: {reason}",
        at=f"prune={option}",
        fix=f"leave {option.partition('=')[0]} out",
    )
