"""Round the weights of products, and the tokens that they are multiplied with, for the option `quantize`.

    linear(x, w)  ->  linear(round_tokens(x), dequantize(w_codes, w_scales, w_zeros))
One rewrite for each weight. It comes last in the canonical stage: names are still the checkpoint's, each norm is
separate so that scales can be folded into it, and the graph runs on one sequence, so that calibration needs nothing
else; later merges and fusions stack codes as they stack weights, since rows are independent.
Must have: weights of finite numbers (check_quantizable) whose columns the scheme's groups divide. Methods: round to
nearest; GPTQ (gptq.py), for which the graph is run on calibration text with the weights before already quantized, and
of experts on the tokens that each was sent (round_experts.py).
Numerics: lossy. Kernels decode where they multiply.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, fx

from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.quantized_weight import QuantizedWeight
from llmc.formats.schemes import Quantization, Scheme
from llmc.graph.call_arguments import call_arguments
from llmc.graph.model_graph import ModelGraph
from llmc.graph.product_parts import is_of_experts
from llmc.graph.refusal import Refusal
from llmc.graph.weights import evaluate
from llmc.ops.token_codes import token_codes, token_values
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.parallel_map import parallel_map
from llmc.passes.planned_weight import why_not, with_schemes
from llmc.passes.quantization.calibration import calibration_sequences, sequences_and_apart
from llmc.passes.quantization.column_sweep import InputSolvers
from llmc.passes.quantization.gptq_products import ProductGptq
from llmc.passes.quantization.insert_codes import insert_tokens, insert_weight
from llmc.passes.quantization.mixed_precision import SchemeOf, choose_schemes
from llmc.passes.quantization.plan import Planned, asked, plan
from llmc.passes.quantization.reference_divergence import Reference
from llmc.passes.quantization.remembered_codes import History, RememberedCodes, Rounded
from llmc.passes.quantization.round_experts import ExpertRows, expert_rows, round_experts
from llmc.passes.quantization.round_weight import (
    RoundedWeight,
    relative_error,
    round_to_nearest,
    rounding_error,
    scale_spans,
)
from llmc.passes.quantization.stream import Stream
from llmc.passes.rewrite import Numerics, WeightPass
from llmc.passes.rewrite_log import RewriteLog

# Number of tokens on which errors are measured.
_MEASURED_ROWS = 256
# Number of sequences on which a plan is carried out if only the scale of its loss is needed.
_ROUGH = 8


def run(graph: ModelGraph, options: BuildOptions, log: RewriteLog, data: ModelData) -> None:
    """Quantize every planned weight, in the order in which the step reads them."""
    quantization = asked(options, data)
    if quantization.is_none:
        return
    planned = plan(graph, quantization)
    sequences: tuple[Tensor, ...] = ()
    reasons: dict[str, str] = {}
    codes = RememberedCodes()
    if quantization.budget is not None:
        sequences, apart = sequences_and_apart(graph, options, data)
        reference = Reference(graph, data.source, apart)

        rough_codes = RememberedCodes()

        def divergence(schemes: SchemeOf, *, is_rough: bool) -> float:
            """Return the divergence of a copy of the graph from the reference when its weights get these schemes, by
            module."""
            trial = graph.copy()
            chosen = with_schemes(plan(trial, quantization), schemes)
            known, text = (rough_codes, sequences[:_ROUGH]) if is_rough else (codes, sequences)
            is_run = bool(text) and _looks_at_inputs(chosen, known)
            stream = Stream(trial, data.source, text) if is_run else None
            Quantizer(trial, None, replace(data, progress=lambda *_: None), stream, {}, known).run(chosen)
            kl = reference.divergence(trial, is_rough=is_rough)
            known.end_plan(kl)
            return kl

        planned, reasons = choose_schemes(graph, planned, quantization.budget, sequences, data, divergence)
    elif quantization.needs_calibration or options.calibration is not None:
        sequences = calibration_sequences(graph, options, data)
    for weight_plan in planned:
        for product in weight_plan.products if weight_plan.scheme is None else ():
            log.refuse(Refusal(_why_not(weight_plan, quantization, reasons), product, is_asked=True))
    if not _looks_at_inputs(planned, codes):
        # Only errors are measured on the text, if there is any.
        sequences = errors_measured_on(sequences)
    stream = Stream(graph, data.source, sequences) if sequences else None
    Quantizer(graph, log, data, stream, reasons, codes).run(planned)


# Single logits of 4-bit weights move by most of the logits' spread; what it costs in quality is measured by perplexity.
_BUDGET = 2.0
quantize_weights = WeightPass("quantize_weights", run, Numerics.LOSSY, budget=_BUDGET)


def _why_not(planned: Planned, quantization: Quantization, reasons: dict[str, str]) -> str:
    if planned.module in reasons:
        return f"{planned.module} keeps all its bits: {reasons[planned.module]}"
    return why_not(planned, quantization, "alone")


class Quantizer:
    """One run over a graph. log: None for a trial, which keeps no record. stream: calibration tokens on their way
    through it; None if no text was given. codes: what runs over copies of the graph found."""

    def __init__(
        self,
        graph: ModelGraph,
        log: RewriteLog | None,
        data: ModelData,
        stream: Stream | None,
        reasons: dict[str, str],
        codes: RememberedCodes,
    ) -> None:
        self._graph, self._log, self._data, self._stream, self._reasons = graph, log, data, stream, reasons
        self._codes = codes
        self._history: History = ()
        self._rounded_tokens: dict[tuple[fx.Node, str, bool, int | None], fx.Node] = {}
        self._gptq: ProductGptq | None = None

    def run(self, planned: tuple[Planned, ...]) -> None:
        """Round each weight when its first reader is reached, or the first that its method needs the input of."""
        if self._stream is not None:
            self._gptq = ProductGptq(self._graph, self._data.source, InputSolvers(self._stream), planned)
        at = {_place(chosen): chosen for chosen in planned if chosen.scheme is not None}
        later = {n: chosen for chosen in planned if chosen.scheme is not None for n in chosen.readers if n not in at}
        stops: Iterator[fx.Node]
        if self._stream is None:
            stops = iter([node for node in self._graph.graph.nodes if node in at or node in later])
        else:
            stops = self._stream.stops([*at, *later])
        done = 0
        for node in stops:
            if node in at:
                self._data.progress("quantize", done, len(at))
                self._quantize(at[node])
                done += 1
            weight_plan = at.get(node) or later[node]
            assert weight_plan.scheme is not None
            if weight_plan.scheme.activation != "none" and node in weight_plan.products:
                self._round_input(node, weight_plan.scheme)
        self._data.progress("quantize", done, len(at))

    def _quantize(self, planned: Planned) -> None:
        scheme = planned.scheme
        assert scheme is not None
        if self._log is not None:
            self._log.step(f"{planned.module} to {scheme.name}", *planned.readers)
        self._history = (*self._history, (planned.module, scheme))
        weight = evaluate(self._graph.weights[planned.weights[0].name], self._data.source)

        def codes() -> Rounded:
            result, unseen = self._rounded(weight, scheme, planned)
            return result.in_file(), unseen

        rounded, unseen = self._codes.of(self._history, codes)
        if self._log is not None:
            self._record(planned, scheme, unseen, *self._error(weight, rounded, planned))
        insert_weight(self._graph, planned.weights, planned.readers, rounded)

    def _record(self, planned: Planned, scheme: Scheme, unseen: str | None, error: float, is_output: bool) -> None:
        rows, columns = planned.shape
        self._graph.quantized = (
            *self._graph.quantized,
            QuantizedWeight(
                module=planned.module,
                scheme=(scheme.fitted(columns) or scheme).name,
                rows=rows,
                columns=columns,
                bits=scheme.bits(columns),
                error=error,
                is_output_error=is_output,
                reason=self._reasons.get(planned.module) or unseen,
            ),
        )

    def _rounded(self, weight: Tensor, scheme: Scheme, planned: Planned) -> Rounded:
        """Round a weight, with a note about experts that saw no token."""
        product = planned.products[0] if planned.products else None
        if product is None or not _needs_input(scheme):
            return round_to_nearest(weight, scheme), None
        assert self._stream is not None, "methods that need inputs are planned only with calibration text"
        if is_of_experts(product):
            is_sparse = any(sparse.module == planned.module for sparse in self._graph.sparse)
            return round_experts(weight, scheme, self._stream, product, weight != 0 if is_sparse else None)
        if scheme.method == "gptq":
            assert self._gptq is not None, "it is made if there is calibration text"
            return self._gptq.codes(planned, weight), None
        return round_to_nearest(weight, scheme, self._stream.mean_squares(call_arguments(product)["x"])), None

    def _round_input(self, product: fx.Node, scheme: Scheme) -> None:
        x = call_arguments(product)["x"]
        key = (x, scheme.activation, scheme.is_static, scheme.token_group)
        if key not in self._rounded_tokens:
            scale = None
            if scheme.is_static:
                assert self._stream is not None, "static scales are planned with calibration text only"
                largest = max(float(part.abs().max()) for part in self._stream.parts(x))
                scale = torch.tensor([max(largest, 1e-12) / CODE_FORMATS[scheme.activation].largest])
            self._rounded_tokens[key] = insert_tokens(
                self._graph, product, x, scale, scheme.activation, scheme.token_group
            )
        # The weight may be the same node as x nowhere, so that this changes the one argument.
        product.replace_input_with(x, self._rounded_tokens[key])

    def _error(self, weight: Tensor, rounded: RoundedWeight, planned: Planned) -> tuple[float, bool]:
        """Root mean square error over the root mean square, of the product's output if there are tokens to measure on,
        else of the weight; and which it is."""
        scheme, products = planned.scheme, planned.products
        assert scheme is not None
        if weight.is_meta:
            return 0.0, False  # Only plans are made of shapes.
        if self._stream is None or not products or products[0] is not _place(planned):
            return rounding_error(weight, rounded, scheme), False
        squares: list[tuple[float, float]] = []
        for read in self._read(products[0], len(weight)):
            x = read.x[:_MEASURED_ROWS].float()
            rounded_x = x
            if scheme.activation != "none":
                rounding = (scheme.activation, scheme.token_group)
                rounded_x = token_values(*token_codes(x, None, *rounding), *rounding)
            own = slice(read.start, read.end)
            squares += _output_squares(x, rounded_x, weight[own], rounded.rows(own), scheme)
        return relative_error(squares), True

    def _read(self, product: fx.Node, rows: int) -> Iterator[ExpertRows]:
        """The inputs of a product's weight, or of each of its experts' weights."""
        assert self._stream is not None
        if is_of_experts(product):
            yield from expert_rows(self._stream, product, rows)
        else:
            yield ExpertRows(0, rows, self._stream.rows(call_arguments(product)["x"], _MEASURED_ROWS))


def _output_squares(
    x: Tensor, rounded_x: Tensor, weight: Tensor, rounded: RoundedWeight, scheme: Scheme
) -> list[tuple[float, float]]:
    """Squared errors of the products, and squares of the products, accumulated over chunks of rows."""

    def squares(span: slice) -> tuple[float, float]:
        expected, seen = x @ weight[span].float().t(), rounded_x @ rounded.rows(span).values().t()
        return float((seen - expected).square().sum()), float(expected.square().sum())

    return parallel_map(squares, scale_spans(weight, scheme))


def errors_measured_on(sequences: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The first sequences, enough for the tokens on which errors are measured."""
    ends = accumulate(map(len, sequences), initial=0)
    return tuple(sequence for sequence, begun in zip(sequences, ends, strict=False) if begun < _MEASURED_ROWS)


def _looks_at_inputs(planned: tuple[Planned, ...], codes: RememberedCodes) -> bool:
    """Whether a method of a plan uses the inputs of a weight whose codes are not known."""
    history: History = ()
    for weight_plan in sorted(planned, key=_place):
        if weight_plan.scheme is not None:
            history = (*history, (weight_plan.module, weight_plan.scheme))
            if weight_plan.scheme.is_static or (_needs_input(weight_plan.scheme) and not codes.has(history)):
                return True
    return False


def _place(planned: Planned) -> fx.Node:
    """Return the node at which a weight is rounded: a tied one at the embedding, unless the method uses the head's
    input."""
    needs_input = planned.scheme is not None and _needs_input(planned.scheme)
    return planned.products[0] if needs_input and planned.products else planned.readers[0]


def _needs_input(scheme: Scheme) -> bool:
    return scheme.method in ("gptq", "awq")
