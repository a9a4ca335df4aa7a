"""What becomes of a weight of a quantized checkpoint: taken as it is stored, rounded again, or left to `quantize`.

Of a GGUF file, what the option `quantize` says of a weight goes before, but codes are never rounded to as many bits as
they have, or more: they stay, and tokens are rounded as asked.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.schemes import NOT_QUANTIZED, Scheme
from llmc.graph.call_arguments import call_arguments
from llmc.graph.gguf.source import GgufSource, RoundedAgain
from llmc.graph.model_graph import ModelGraph
from llmc.graph.onnx.source import OnnxSource
from llmc.graph.product_parts import is_product
from llmc.graph.quantized_checkpoint import QuantizedSource, StoredWeight
from llmc.graph.weights import Stored, stored_names
from llmc.options import BuildOptions
from llmc.passes.planned_weight import HEAD, module_names
from llmc.passes.quantization.plan import head_scheme
from llmc.passes.quantization.rows_of_others import rows_of, transposed_experts

CodeSource = QuantizedSource | GgufSource | OnnxSource


def stored_or_asked(
    source: CodeSource, graph: ModelGraph, readers: Sequence[fx.Node], options: BuildOptions
) -> StoredWeight | RoundedAgain | str:
    """How the codes of the readers' weight are stored, what its blocks are rounded to, or why it is left alone."""
    node = call_arguments(readers[0])["weight"]
    recipe = graph.weights[node.name]
    stored, whole = None, transposed_experts(recipe)
    if isinstance(recipe, Stored):
        stored = _stored(source, recipe.name)
    elif whole is not None:
        found = _stored(source, whole.name)
        is_whole = not isinstance(found, StoredWeight) or found.shape == tuple(node.meta["val"].shape)
        stored = found if is_whole else None
    elif rows_of(recipe, "codes", torch.int8) is not None:
        stored = _of_all(source, stored_names(recipe), node.meta["val"].shape)
    if stored is None:
        return f"the checkpoint holds {node.name} without codes"
    return _as_asked(stored, graph, readers, options) if isinstance(source, GgufSource) else stored


def _stored(source: CodeSource, name: str) -> StoredWeight | RoundedAgain | None:
    found = source.weight(name)
    return source.rounded(name) if found is None and isinstance(source, GgufSource) else found


def _of_all(source: CodeSource, names: Sequence[str], shape: Sequence[int]) -> StoredWeight | RoundedAgain | None:
    """Of a matrix that is made of others' rows, under the name of the first; None if they are not stored alike."""
    each = [_stored(source, name) for name in names]
    first = each[0]
    if first is None or not _are_alike(source, names) or source.shape(names[0])[-1] != int(shape[1]):
        return None
    return replace(first, shape=(int(shape[0]), int(shape[1]))) if isinstance(first, StoredWeight) else first


def _are_alike(source: CodeSource, names: Sequence[str]) -> bool:
    """Whether the matrices have the same number of columns, and codes of one kind."""
    if len({source.shape(name)[-1] for name in names}) != 1:
        return False
    if isinstance(source, GgufSource):
        return len({source.stored_type(name) for name in names}) == 1
    return isinstance(source, QuantizedSource) and source.are_alike(names)


def _as_asked(
    stored: StoredWeight | RoundedAgain, graph: ModelGraph, readers: Sequence[fx.Node], options: BuildOptions
) -> StoredWeight | RoundedAgain | str:
    quantization = options.quantization
    module, name = module_names(graph, readers)
    rule = quantization.rule_for(module, name)
    is_none = NOT_QUANTIZED in options.quantize
    multiplies = any(map(is_product, readers))
    if rule is None and not is_none and not (quantization.is_for_all and multiplies):
        return stored
    scheme = quantization.default if rule is None else rule.scheme
    if rule is None and scheme is not None and module == HEAD:
        scheme = head_scheme(scheme)
    if scheme is not None and isinstance(stored, StoredWeight) and _says_no_more(scheme, stored):
        return replace(stored, scheme=replace(stored.scheme, activation=scheme.activation))
    return f"quantize asks for {'none' if scheme is None else scheme.name} in the place of {name}'s codes"


def _says_no_more(scheme: Scheme, stored: StoredWeight) -> bool:
    """Whether codes rounded so would say no more than those that are there."""
    format = stored.scheme.format
    if scheme.is_static or scheme.activation not in CODE_FORMATS[format].activations:
        return False
    return scheme.format == format or (scheme.codes.integers is not None and scheme.code_bits >= stored.scheme.bits)
