"""Set elements of weights to zero, for the option `sparsity`.

    linear(x, w)  ->  linear(x, pruned(w))       the recipe of w changes: its elements where a mask says so, else zero
    linear(x, w)  ->  linear(x, sparse_bitmask(values, masks))     likewise, if the kept elements also change: SparseGPT
One rewrite per weight. Runs after scales are folded into weights and before rounding, so that codes are those of the
kept elements. store_sparse, the last pass but one, stores the result without its zeros. Must have: columns that the
pattern divides; a weight that is not zero everywhere. Methods: magnitude, the largest elements of the matrix are kept;
Wanda (Sun et al. 2023, "A simple and effective pruning approach for large language models"), of each row those with the
largest |w|·‖x‖; SparseGPT (sparsegpt.py). The latter two run the graph on calibration text, with the weights before
already sparse. Numerics: lossy.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from llmc.errors import CheckpointError, OptionError
from llmc.formats.sparse_weight import SparseWeight
from llmc.formats.sparsity import SparseScheme
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_product
from llmc.graph.refusal import Refusal
from llmc.graph.weights import Constant, Derived, Recipe, evaluate, stored_names
from llmc.ops.sparse_weight import is_stored, mask_words
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.parallel_map import parallel_map, row_spans
from llmc.passes.planned_weight import why_not, with_schemes
from llmc.passes.quantization.calibration import calibration_sequences, sequences_and_apart
from llmc.passes.quantization.column_sweep import InputSolvers
from llmc.passes.quantization.file_backed import file_backed
from llmc.passes.quantization.reference_divergence import Reference
from llmc.passes.quantization.round_weight import relative_error
from llmc.passes.quantization.stream import Stream
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog
from llmc.passes.sparsity.choose_ratios import SchemeOf, choose_ratios
from llmc.passes.sparsity.choose_zeros import kept_elements
from llmc.passes.sparsity.plan import PlannedZeros, is_free, plan_zeros
from llmc.passes.sparsity.sparsegpt import sparsegpt

# Tokens that errors are measured on.
_MEASURED_ROWS = 256


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Every planned weight, in the order in which the step reads them."""
    sparsity = options.zeros
    if sparsity.is_none:
        return
    done = {weight.module for weight in graph.sparse}
    planned = tuple(weight for weight in plan_zeros(graph, sparsity) if weight.module not in done)
    if not planned and not done and graph.quantized:
        raise OptionError(
            f"{len(graph.quantized)} weights are stored as codes, and there is no other that can be made sparse",
            at=f"sparsity={','.join(options.sparsity)}",
            fix="decode the codes to numbers first: --quantize none",
        )
    sequences: tuple[Tensor, ...] = ()
    reasons: dict[str, str] = {}
    if sparsity.budget is not None:
        sequences, apart = sequences_and_apart(graph, options, data)
        reference = Reference(graph, data.source, apart)

        def divergence(schemes: SchemeOf) -> float:
            """Return the divergence of a copy of the graph from the reference when its weights get these schemes, by
            module."""
            trial = graph.copy()
            chosen = with_schemes(
                [weight for weight in plan_zeros(trial, sparsity) if weight.module not in done], schemes
            )
            quiet = replace(data, progress=lambda *_: None)
            _Sparsifier(trial, None, quiet, Stream(trial, data.source, sequences), {}).run(chosen)
            return reference.divergence(trial)

        free = [weight for weight in planned if is_free(weight)]
        schemes, reasons = choose_ratios(graph, free, sparsity.budget, sequences, data, divergence)
        planned = with_schemes(planned, schemes)
    elif sparsity.needs_calibration or options.calibration is not None:
        sequences = calibration_sequences(graph, options, data)
    for plan in planned:
        for product in plan.products if plan.scheme is None else ():
            log.refuse(Refusal(why_not(plan, sparsity, "dense"), product, is_asked=True))
    for product in _products_of_codes(graph):
        log.refuse(Refusal("its weight is stored as codes, which stay as they are", product, is_asked=True))
    _Sparsifier(graph, log, data, Stream(graph, data.source, sequences) if sequences else None, reasons).run(planned)


def _products_of_codes(graph: ModelGraph) -> list[fx.Node]:
    codes = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.dequantize.default)
    return [user for weight in codes for user in weight.users if is_product(user)]


# Single logits of a model with half of its weights move by most of the logits' spread.
_BUDGET = 2.0
sparsify = WeightPass("sparsify", run, Numerics.LOSSY, budget=_BUDGET)


class _Sparsifier:
    """One run over a graph. log: None for a trial. stream: calibration tokens on their way through it; None if no
    text was given. reasons: by module, of a share of zeros."""

    def __init__(
        self,
        graph: ModelGraph,
        log: RewriteLog | None,
        data: ModelData,
        stream: Stream | None,
        reasons: dict[str, str],
    ) -> None:
        self._graph, self._log, self._data, self._stream, self._reasons = graph, log, data, stream, reasons
        self._solvers = None if stream is None else InputSolvers(stream)

    def run(self, planned: tuple[PlannedZeros, ...]) -> None:
        """Each weight when its first reader is reached, or the first that its method needs the input of."""
        at = {_place(weight, weight.scheme): (weight, weight.scheme) for weight in planned if weight.scheme is not None}
        stops: Iterator[fx.Node] = iter(at) if self._stream is None else self._stream.stops(list(at))
        for node in self._data.told("sparsify", stops, len(at)):
            plan, scheme = at[node]
            if self._log is not None:
                why = f" ({self._reasons[plan.module]})" if plan.module in self._reasons else ""
                self._log.step(f"{plan.module} to {scheme.name}{why}", *plan.readers)
            self._sparsify(plan, scheme, self._input(plan, node))

    def _input(self, planned: PlannedZeros, node: fx.Node) -> fx.Node | None:
        """The stream's input of the product with the weight."""
        if self._stream is None or node not in planned.products:
            return None
        x = call_arguments(node)["x"]
        assert isinstance(x, fx.Node)
        return x

    def _sparsify(self, planned: PlannedZeros, scheme: SparseScheme, x: fx.Node | None) -> None:
        weight = evaluate(self._graph.weights[planned.weights[0].name], self._data.source)
        refuse_zeros(planned.tensor, weight)
        rows = None if x is None or self._stream is None else self._stream.rows(x, _MEASURED_ROWS).float()
        if scheme.method == "sparsegpt":
            assert x is not None and self._solvers is not None, "planned for products and with text only"
            value, kept = sparsegpt(weight, self._solvers.of(x, scheme), scheme)
            replace_weight(self._graph, planned, value)
        else:
            kept = self._kept(weight, scheme, x)
            value = weight.masked_fill(~kept, 0.0)
            prune_weight(self._graph, planned, kept)
        self._graph.sparse = (*self._graph.sparse, sparse_record(planned, scheme, weight, value, rows))

    def _kept(self, weight: Tensor, scheme: SparseScheme, x: fx.Node | None) -> Tensor:
        """Return which elements are kept, by Wanda within each row, or by magnitude: [out, in], bool."""
        if scheme.method == "magnitude":
            return kept_elements(weight.abs().float(), scheme, by_row=False)
        assert x is not None and self._stream is not None, "planned for products and with text only"
        norms = self._stream.mean_squares(x).sqrt()

        def kept(rows: slice) -> Tensor:
            return kept_elements(weight[rows].abs().float().mul_(norms), scheme, by_row=True)

        return torch.cat(parallel_map(kept, row_spans(weight)))


def _place(planned: PlannedZeros, scheme: SparseScheme) -> fx.Node:
    """Return the node at which a weight becomes sparse: a tied one at the embedding, unless the method uses the head's
    input."""
    return planned.products[0] if scheme.needs_calibration else planned.readers[0]


def refuse_zeros(tensor: str, weight: Tensor) -> None:
    """Raise CheckpointError for a weight that is zero everywhere."""
    if not bool(weight.any()):
        raise CheckpointError(
            f"tensor {tensor} {list(weight.shape)} holds nothing but zeros",
            at=tensor,
            fix="download the checkpoint again, or check how it was made sparse",
        )


def sparse_record(
    planned: PlannedZeros, scheme: SparseScheme, weight: Tensor, value: Tensor, x: Tensor | None
) -> SparseWeight:
    """The record of a weight that becomes `value`. x: inputs [tokens, columns], fp32, for measuring the error; None
    measures the error of the weight itself."""
    rows, columns = planned.shape

    def squares(span: slice) -> tuple[float, float]:
        expected = weight[span].float()
        lost = value[span].float() - expected
        if x is not None:
            expected, lost = x @ expected.t(), x @ lost.t()
        return float(lost.square().sum()), float(expected.square().sum())

    return SparseWeight(
        module=planned.module,
        tensor=planned.tensor,
        scheme=scheme.name,
        rows=rows,
        columns=columns,
        zeros=1.0 - float((value != 0).sum()) / weight.numel(),
        error=relative_error(parallel_map(squares, row_spans(weight))),
        is_output_error=x is not None,
    )


_llmc = torch.ops.llmc


def prune_weight(graph: ModelGraph, planned: PlannedZeros, kept: Tensor) -> None:
    """Make the elements zero that are not kept: [out, in], bool. The others stay what the checkpoint says."""
    recipe = graph.weights[planned.weights[0].name]
    _set(graph, planned, Derived(_llmc.pruned.default, (recipe, Constant(file_backed(mask_words(kept))))))


def replace_weight(graph: ModelGraph, planned: PlannedZeros, value: Tensor) -> None:
    """Give a weight other elements [out, in], most of them zero; of its dtype."""
    stored = is_stored(value)
    names = stored_names(graph.weights[planned.weights[0].name])
    parts = Constant(file_backed(value[stored]), names), Constant(file_backed(mask_words(stored)))
    _set(graph, planned, Derived(_llmc.sparse_bitmask.default, (*parts, value.shape[1], value.dtype)))


def _set(graph: ModelGraph, planned: PlannedZeros, recipe: Recipe) -> None:
    """Set the recipe of one placeholder, which all readers of a tied weight read from now on."""
    first, *others = planned.weights
    graph.weights[first.name] = recipe
    for other in others:
        for reader in planned.readers:
            reader.replace_input_with(other, first)
