"""The treatment of a weight of a quantized checkpoint: kept as stored, rounded again, or left to `quantize`.

Where the source gives way, as GGUF files do, the option `quantize` takes precedence, but codes are never rounded again
to the same or a larger number of bits: they are kept, and tokens are rounded as requested.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from llmc.formats.code_format import CODE_FORMATS, TOKEN_GROUP
from llmc.formats.schemes import NOT_QUANTIZED, Scheme
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_product
from llmc.graph.stored_codes import CodeSource, RoundedAgain, StoredWeight
from llmc.graph.weights import Stored, stored_names
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.planned_weight import HEAD, module_names
from llmc.passes.quantization.plan import asked, head_scheme
from llmc.passes.quantization.rows_of_others import rows_of, transposed_experts


def stored_or_asked(
    source: CodeSource, graph: ModelGraph, readers: Sequence[fx.Node], options: BuildOptions, data: ModelData
) -> StoredWeight | RoundedAgain | str:
    """Return how the codes of the readers' weight are stored, how its blocks are rounded, or why it is left alone."""
    node = call_arguments(readers[0])["weight"]
    recipe = graph.weights[node.name]
    stored, whole = None, transposed_experts(recipe)
    if isinstance(recipe, Stored):
        stored = _stored(source, recipe.name)
    elif whole is not None:
        answer = _stored(source, whole.name)
        is_whole = not isinstance(answer, StoredWeight) or answer.shape == tuple(node.meta["val"].shape)
        stored = answer if is_whole else None
    elif rows_of(recipe, "codes", torch.int8) is not None:
        stored = _of_all(source, stored_names(recipe), node.meta["val"].shape)
    if stored is None:
        return f"the checkpoint holds {node.name} without codes"
    return _as_asked(stored, graph, readers, options, data) if source.gives_way else stored


def _stored(source: CodeSource, name: str) -> StoredWeight | RoundedAgain | None:
    return source.weight(name) or source.rounded(name)


def _of_all(source: CodeSource, names: Sequence[str], shape: Sequence[int]) -> StoredWeight | RoundedAgain | None:
    """The stored weight of a matrix made of several weights' rows, under the name of the first; None if they are not
    stored alike."""
    parts = [_stored(source, name) for name in names]
    first = parts[0]
    rows, columns = map(int, shape)
    if isinstance(first, RoundedAgain):
        return first if source.are_alike(names) else None
    if first is None or first.shape[1] != columns or not source.are_alike(names):
        return None
    return replace(first, shape=(rows, columns))


def _as_asked(
    stored: StoredWeight | RoundedAgain,
    graph: ModelGraph,
    readers: Sequence[fx.Node],
    options: BuildOptions,
    data: ModelData,
) -> StoredWeight | RoundedAgain | str:
    quantization = asked(options, data)
    module, name = module_names(graph, readers)
    rule = quantization.rule_for(module, name)
    is_none = NOT_QUANTIZED in options.quantize
    multiplies = any(map(is_product, readers))
    if rule is None and not is_none and not (quantization.is_for_all and multiplies):
        return _with_tokens(stored, options) if multiplies and data.tokens.rounds_plain else stored
    scheme = quantization.default if rule is None else rule.scheme
    if rule is None and scheme is not None and module == HEAD:
        scheme = head_scheme(scheme)
    if scheme is not None and isinstance(stored, StoredWeight) and _says_no_more(scheme, stored):
        return replace(stored, activation=scheme.activation, token_group=scheme.token_group)
    return f"quantize asks for {'none' if scheme is None else scheme.name} in the place of {name}'s codes"


def _with_tokens(stored: StoredWeight | RoundedAgain, options: BuildOptions) -> StoredWeight | RoundedAgain:
    """Return the scheme with tokens in int8 by groups if there are such products; an engine in float32 does not round
    tokens."""
    if options.dtype == "float32" or not isinstance(stored, StoredWeight):
        return stored
    if "int8" not in CODE_FORMATS[stored.format].activations:
        return stored
    return replace(stored, activation="int8", token_group=TOKEN_GROUP)


def _says_no_more(scheme: Scheme, stored: StoredWeight) -> bool:
    """Whether codes rounded so would say no more than those that are there."""
    if scheme.is_static or scheme.activation not in CODE_FORMATS[stored.format].activations:
        return False
    has_levels = scheme.codes.integers is not None or scheme.codes.is_blocked
    return scheme.format == stored.format or (has_levels and scheme.code_bits >= stored.bits)
