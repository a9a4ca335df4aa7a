"""Use the codes of a quantized checkpoint as they are.

    linear(x, w)  ->  linear(x', dequantize(w::codes, w::scales, w::zeros))
where x' is x rounded as the checkpoint specifies, or its channels in the order of the codes' columns (GPTQ's
act-order). Blocks of a GGUF file that no code format represents exactly are rounded again, with slightly more bits. One
rewrite for each weight. Runs before any other quantization, which then sees what is left.
Must have: a source of weights that holds codes (graph/stored_codes.py). Numerics: exact for codes that are taken; lossy
where weights are rounded again, or activations.
"""

from dataclasses import replace

import torch
from torch import Tensor, fx

from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.quantized_weight import QuantizedWeight
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_product
from llmc.graph.refusal import Refusal
from llmc.graph.stored_codes import CodeSource, RoundedAgain, StoredWeight, UnpackedCodes
from llmc.graph.weights import Constant, Stored, evaluate
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.planned_weight import module_names, readers_of_weights
from llmc.passes.quantization.insert_codes import insert_recipes, insert_tokens, insert_weight
from llmc.passes.quantization.round_weight import round_to_nearest, rounding_error
from llmc.passes.quantization.rows_of_others import rows_of
from llmc.passes.quantization.stored_or_asked import stored_or_asked
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog

# The codes to read, their rounding and their order.
_InputKey = tuple[fx.Node, str, int | None, bytes]


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Replace every weight that the checkpoint has as codes."""
    source = data.source
    if not isinstance(source, CodeSource) or not source.is_quantized:
        return
    inputs: dict[_InputKey, fx.Node] = {}
    for readers in readers_of_weights(graph):
        stored = stored_or_asked(source, graph, readers, options, data)
        products = [reader for reader in readers if is_product(reader)]
        if isinstance(stored, str):
            for product in products:
                log.refuse(Refusal(stored, product, is_asked=True))
            continue
        if isinstance(stored, RoundedAgain):
            _round_again(graph, readers, stored, log, data)
            continue
        log.step(f"{stored.name.removesuffix('.weight')} as {stored.label}", *readers)
        unpacked = _for_all_rows(source.unpacked(stored.name), stored)
        _insert(graph, readers, stored, unpacked)
        for product in products:
            _change_input(graph, product, stored, unpacked.order, source, inputs)
        graph.quantized = (*graph.quantized, _record(stored, unpacked))


# Codes that are taken as they are cost nothing; blocks that are rounded again cost what a quantization does.
_BUDGET = 2.0
read_codes = WeightPass("read_codes", run, Numerics.LOSSY, budget=_BUDGET)


def _insert(graph: ModelGraph, readers: tuple[fx.Node, ...], stored: StoredWeight, unpacked: UnpackedCodes) -> None:
    like = unpacked.parts()
    weights = tuple(dict.fromkeys(call_arguments(reader)["weight"] for reader in readers))
    whole = graph.weights[weights[0].name]
    by_part = {name: rows_of(whole, name, part.dtype) for name, part in like.items()}
    recipes = {name: recipe for name, recipe in by_part.items() if recipe is not None}
    insert_recipes(graph, weights, readers, recipes, like, stored.format)


def _round_again(
    graph: ModelGraph, readers: tuple[fx.Node, ...], again: RoundedAgain, log: RewriteLog, data: ModelData
) -> None:
    """Round a weight to the nearest codes of a format that kernels have."""
    weights = tuple(dict.fromkeys(call_arguments(reader)["weight"] for reader in readers))
    _, module = module_names(graph, readers)
    label = f"{again.type} as {again.scheme.name}"
    log.step(f"{module}: {label}", *readers)
    recipe = graph.weights[weights[0].name]
    weight = data.source.load(again.name) if isinstance(recipe, Stored) else evaluate(recipe, data.source)
    rounded = round_to_nearest(weight, again.scheme)
    rows, columns = weight.shape
    record = QuantizedWeight(
        module=module,
        scheme=label,
        rows=rows,
        columns=columns,
        bits=again.scheme.bits(columns),
        error=rounding_error(weight, rounded, again.scheme),
    )
    insert_weight(graph, weights, readers, rounded.in_file())
    graph.quantized = (*graph.quantized, record)


def _for_all_rows(unpacked: UnpackedCodes, stored: StoredWeight) -> UnpackedCodes:
    """Shapes and dtypes of a matrix with more rows than the stored ones that it repeats."""
    rows = stored.shape[0]
    if len(unpacked.codes) == rows:
        return unpacked
    return replace(unpacked, **{name: part.new_empty(rows, part.shape[1]) for name, part in unpacked.parts().items()})


def _change_input(
    graph: ModelGraph,
    product: fx.Node,
    stored: StoredWeight,
    order: Tensor | None,
    source: CodeSource,
    inputs: dict[_InputKey, fx.Node],
) -> None:
    """Order and round what a product reads; products that need the same order and rounding share it, so that they can
    be merged."""
    x = call_arguments(product)["x"]
    scale = source.input_scale(stored.name)
    marks = b"".join(b"" if tensor is None else tensor.numpy().tobytes() for tensor in (order, scale))
    key = (x, stored.activation, stored.token_group, marks)
    if key not in inputs:
        changed = x
        if order is not None:
            columns = new_weight(
                graph, f"{x.name}_order", Constant(order.int()), x.meta["val"].new_empty(len(order), dtype=torch.int32)
            )
            with graph.graph.inserting_before(product):
                changed = graph.graph.call_function(torch.ops.llmc.select_channels.default, (x, columns))
        if stored.activation != "none":
            changed = insert_tokens(graph, product, changed, scale, stored.activation, stored.token_group)
        inputs[key] = changed
    if inputs[key] is not x:
        product.replace_input_with(x, inputs[key])


def _record(stored: StoredWeight, unpacked: UnpackedCodes) -> QuantizedWeight:
    rows, columns = stored.shape
    steps = CODE_FORMATS[stored.format].steps
    bits = {"zeros": stored.bits, "scale_steps": 0 if steps is None else steps.bits}
    bits["minimum_steps"] = bits["scale_steps"]
    parts = {name: part for name, part in unpacked.parts().items() if name != "codes"}
    overhead = sum(part.numel() * bits.get(name, part.dtype.itemsize * 8) for name, part in parts.items())
    return QuantizedWeight(
        module=stored.name.removesuffix(".weight"),
        scheme=stored.label,
        rows=rows,
        columns=columns,
        bits=stored.bits + overhead / (rows * columns),
    )
