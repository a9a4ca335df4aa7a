"""Find errors in `quantize`, `sparsity`, `prune` and `kv_cache` before a calibration of hours.

Checked, the cheap first: rules and groups against the weights, the groups of a KV cache against the heads of every
attention, the calibration data; then every stored tensor that the graph reads, one at a time, for numbers that are NaN
or infinite, by its name in the checkpoint: calibration would spread them over all that comes after. Changes nothing;
raises OptionError and CheckpointError. Must have: names that are still the checkpoint's.
"""

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.formats.cache_format import CacheFormats, parse_cache_formats
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import Stored, stored_names
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.parallel_map import one_thread
from llmc.passes.planned_weight import check_patterns, modules_of
from llmc.passes.quantization.calibration import calibration_sequences, needs_text
from llmc.passes.quantization.plan import plan
from llmc.passes.quantization.quantize_kv_cache import check_heads
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.sparsity.plan import plan_zeros

# Numbers that are summed at a time, so that they stay in a core's cache.
_CHUNK = 1 << 16


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Check the options; nothing where weights and caches stay as they are."""
    quantization, zeros, pruning = options.quantization, options.zeros, options.pruning
    check_plans(graph, options)
    check_patterns(pruning.rules, modules_of(graph), "prune")
    if options.kv_cache != "auto":
        _check_caches(graph, parse_cache_formats(options.kv_cache))
    looks = needs_text(options)
    if quantization.is_none and zeros.is_none and pruning.is_none and not looks:
        return
    if looks or options.calibration is not None:
        calibration_sequences(graph, options, data)
        _check_numbers(graph, data, "to calibrate with", "choose a scheme that rounds to nearest, such as int4")
    if not zeros.is_none:
        _check_numbers(graph, data, "to choose zeros of", "leave --sparsity out")
    _check_finite(graph, data)


def check_plans(graph: ModelGraph, options: BuildOptions) -> None:
    """Rules, groups and patterns against the weights as they are now. Raises OptionError."""
    if not options.quantization.is_none:
        plan(graph, options.quantization)
    if not options.zeros.is_none:
        plan_zeros(graph, options.zeros)


check_quantizable = WeightPass("check_quantizable", run, Numerics.EXACT, unproved="it changes nothing")


def _check_caches(graph: ModelGraph, format: CacheFormats) -> None:
    """page_kv_cache will number the layers as they come here."""
    attentions = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.attention.default)
    for layer, node in enumerate(attentions):
        arguments = call_arguments(node)
        keys, values = (int(arguments[name].meta["val"].shape[2]) for name in ("k", "v"))
        check_heads(layer, keys, values, format)


def _check_numbers(graph: ModelGraph, data: ModelData, purpose: str, instead: str) -> None:
    """Calibration runs the model, and zeros are chosen by numbers; there may be no more than shapes."""
    name = next(name for recipe in graph.weights.values() for name in stored_names(recipe))
    if data.source.load(name).is_meta:
        raise CheckpointError(
            f"there are no weights {purpose}",
            at=name,
            fix=f"download them as well, or {instead}",
        )


def _check_finite(graph: ModelGraph, data: ModelData) -> None:
    recipes = graph.weights.values()
    dtypes = {recipe.name: recipe.dtype for recipe in recipes if isinstance(recipe, Stored)}
    # The parts of a weight that is stored as codes are checked together, as the weight that they represent.
    names = dict.fromkeys(name.partition("::")[0] for recipe in recipes for name in stored_names(recipe))
    for name in data.told("check weights", names, len(names)):
        tensor = data.source.load(name)
        if tensor.is_floating_point() and not tensor.is_meta:
            # Narrower than the checkpoint's, the model's dtype may not hold its largest numbers.
            _check_tensor(name, tensor.to(dtypes.get(name, tensor.dtype)))


def _check_tensor(name: str, tensor: Tensor) -> None:
    with one_thread():
        # The sum of finite numbers is finite, except for absurdly large ones, which are counted one by one.
        if all(bool(torch.isfinite(part.float().sum())) for part in tensor.reshape(-1).split(_CHUNK)):
            return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise CheckpointError(
            f"tensor {name} holds {bad} numbers that are NaN or infinite in {str(tensor.dtype).removeprefix('torch.')}",
            at=name,
            fix="download the checkpoint again, or check how it was trained",
        )
