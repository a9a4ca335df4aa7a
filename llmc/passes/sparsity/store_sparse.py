"""Store weights without their zeros: the remaining elements, with masks.

    linear(x, w)                             ->  linear(x, sparse_bitmask(values(w), masks(w)))
    linear(x, dequantize(codes, scales))     ->  linear(x, sparse_codes(values(codes), masks(codes), scales))
    fused_linear, gated_linear, lm_head, embedding  ->  the same
One rewrite for each weight that sparsify or read_sparse noted, after all merges and fusions, so that those see dense
weights; the recipes make values and masks while weights stream into the engine. How many elements are left is counted
here, on every rank; all have room for the most.
Must have: a weight that only products and lookups read; codes that are int8 without zero points; fewer bits with
masks than with zeros. Numerics: exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from llmc.formats.sparse_weight import SparseWeight, sparse_bits
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.op_record import Part, record_of
from llmc.graph.refusal import Refusal
from llmc.graph.weights import Derived, evaluate, stored_names
from llmc.ops.sparse_weight import MASK_BITS, is_stored
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.recorded_graph import new_weight
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog

_llmc = torch.ops.llmc
_DEQUANTIZE = _llmc.dequantize.default
# Bits with masks may be this share of those with zeros: less is not worth finding each element's place.
_MOST_BITS = 0.95


@dataclass(frozen=True)
class _Candidate:
    """A weight that may be stored without its zeros. weight: as products read it. data: the placeholder of its elements
    or codes. noted: what it is made of."""

    weight: fx.Node
    data: fx.Node
    noted: tuple[SparseWeight, ...]

    @property
    def codes(self) -> dict[str, Any] | None:
        """The arguments of a weight that is codes."""
        return call_arguments(self.weight) if self.weight is not self.data else None

    def overhead(self) -> float:
        """Bits a weight that scales take."""
        if self.codes is None:
            return 0.0
        scales = self.codes["scales"].meta["val"]
        bits: float = 8 * scales.dtype.itemsize * scales.numel() / self.data.meta["val"].numel()
        return bits


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Store every weight that was noted, in the order in which the step reads them."""
    if not graph.sparse:
        return
    candidates = _candidates(graph)
    for candidate in data.told("store sparse", candidates, len(candidates)):
        refusal = _refusal(graph, candidate) or _store(graph, candidate, log, data)
        if refusal is not None:
            log.refuse(refusal)
            _note(graph, candidate, reason=refusal.reason)


store_sparse = WeightPass(
    "store_sparse",
    run,
    Numerics.EXACT,
    unproved="where zeros lie is read off the data of weights, which are symbols here",
)


def _candidates(graph: ModelGraph) -> Sequence[_Candidate]:
    by_tensor = {weight.tensor: weight for weight in graph.sparse}
    candidates: dict[fx.Node, _Candidate] = {}
    for node in graph.graph.nodes:
        record = record_of(node)
        weight = call_arguments(node)["weight"] if record is not None and "weight" in record.takes else None
        if weight is None or weight in candidates:
            continue
        data = call_arguments(weight)["codes"] if weight.target is _DEQUANTIZE else weight
        if data.name in graph.weights:
            noted = tuple(by_tensor[name] for name in stored_names(graph.weights[data.name]) if name in by_tensor)
            if noted:
                candidates[weight] = _Candidate(weight, data, noted)
    return tuple(candidates.values())


def _refusal(graph: ModelGraph, candidate: _Candidate) -> Refusal | None:
    """The reason not to store a weight sparsely, found before counting."""
    codes = candidate.codes
    if codes is not None and (codes["format"] != "int8" or codes["zeros"] is not None):
        points = "" if codes["zeros"] is None else " with zero points"
        return Refusal(f"its codes are {codes['format']}{points}: masks are for int8 without them", candidate.weight)
    for reader in candidate.weight.users:
        record = record_of(reader)
        if record is None or record.takes.get("weight") is not Part.STORAGE:
            return Refusal(f"{reader.name}, a {reader.target}, reads it too", candidate.weight, users=(reader,))
    return None


def _store(graph: ModelGraph, candidate: _Candidate, log: RewriteLog, data: ModelData) -> Refusal | None:
    recipe, value = graph.weights[candidate.data.name], candidate.data.meta["val"]
    counts = [int(is_stored(evaluate(recipe, data.source, rank)).sum()) for rank in range(graph.ranks)]
    bits, overhead, zeros = 8 * value.dtype.itemsize, candidate.overhead(), 1.0 - max(counts) / value.numel()
    stored, dense = sparse_bits(bits, zeros) + overhead, bits + overhead
    if stored > _MOST_BITS * dense:
        return Refusal(
            f"{zeros:.1%} of it is zero: {stored:.2f} bits per weight with masks, {dense:.2f} without", candidate.weight
        )
    log.step(f"{candidate.data.name}, {zeros:.1%} zeros", *candidate.weight.users)
    rows, columns = value.shape
    masks, of_row = Derived(_llmc.sparse_masks.default, (recipe,)), -(-columns // MASK_BITS)
    values = Derived(_llmc.sparse_values.default, (recipe, max(counts)))
    parts = (
        new_weight(graph, f"{candidate.data.name}_values", values, value.new_empty(max(counts))),
        new_weight(graph, f"{candidate.data.name}_masks", masks, value.new_empty((rows, of_row), dtype=torch.int64)),
    )
    codes = candidate.codes
    with graph.graph.inserting_before(min(candidate.weight.users)):
        if codes is None:
            storage = graph.graph.call_function(_llmc.sparse_bitmask.default, (*parts, columns, value.dtype))
        else:
            arguments = (*parts, codes["scales"], columns, codes["format"], codes["dtype"])
            storage = graph.graph.create_node("call_function", _llmc.sparse_codes.default, arguments)
    candidate.weight.replace_all_uses_with(storage)
    _note(graph, candidate, bits=stored, dense_bits=dense)
    return None


def _note(graph: ModelGraph, candidate: _Candidate, **what: Any) -> None:
    modules = {weight.module for weight in candidate.noted}
    graph.sparse = tuple(replace(weight, **what) if weight.module in modules else weight for weight in graph.sparse)
