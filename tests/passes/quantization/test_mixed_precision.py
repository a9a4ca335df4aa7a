"""A budget of bits is kept and goes to the sensitive weights of the shipped model, and the reasons are told."""

from __future__ import annotations

import json
import math
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from llmc.errors import OptionError
from llmc.formats.scheme_text import parse_quantization, parse_scheme
from llmc.formats.schemes import Scheme
from llmc.frontends.capture import capture
from llmc.frontends.captured import Captured
from llmc.graph.execute import run_tokens
from llmc.graph.weights import WeightSource
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import canonical, quantization
from llmc.passes.quantization.calibration import sequences_and_apart
from llmc.passes.quantization.mixed_precision import Candidate, least_of_blocked
from llmc.passes.quantization.quantize_weights import errors_measured_on
from llmc.passes.quantization.reference_divergence import Reference
from llmc.passes.quantization.round_weight import round_to_nearest
from llmc.passes.quantization.sensitivity import measured_on
from llmc.passes.quantization.spend_bits import Rung, spend
from llmc.passes.runner import PipelineResult, run_pipeline
from tests.passes.quantization.quantizing import calibration_file, captured_llama, quantized

_EXAMPLES = Path(__file__).parents[3] / "examples"
_MODEL = _EXAMPLES / "models" / "bard-draft"
# GGUF's formats with at least 4 bits per code.
_BLOCKED = ("q4_1", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")


@pytest.fixture(scope="module")
def bard() -> Captured:
    options = parse_options({})
    captured = capture(_MODEL, options)
    return Captured(run_pipeline(captured.graph, canonical(), options).graph, captured.source)


def _quantized(bard: Captured, quantize: str) -> PipelineResult:
    calibration = {"calibration": str(_EXAMPLES / "data" / "calibration.txt"), "calibration_sequences": 4}
    options = parse_options({"quantize": quantize, **calibration})
    data = ModelData(bard.source, _MODEL / "tokenizer.json")
    return run_pipeline(bard.graph, quantization(), options, data=data)


def test_spends_the_budget_on_what_is_sensitive(bard: Captured) -> None:
    weights = _quantized(bard, "auto:5").graph.quantized
    elements = sum(w.rows * w.columns for w in weights)
    assert 4.8 < sum(w.bits * w.rows * w.columns for w in weights) / elements <= 5.0
    coded = product((4, 5, 6), ("", ":g64", ":g32"), ("", ":asym"))
    given = {f"int{bits}-gptq{group}{zeros}" for bits, group, zeros in coded}
    # A super-block's length is not part of the choice.
    kinds = {re.sub(r":s\d+$", "", w.scheme) for w in weights}
    assert kinds <= given | {f"{name}-gptq" for name in _BLOCKED} | {"int8"}
    divergences = {w.module: float((w.reason or "").split()[1]) for w in weights}
    assert all("in sensitivity" in (w.reason or "") for w in weights)
    raised = [w for w in weights if w.scheme != "int4-gptq"]
    assert raised
    least = min(divergences[w.module] / (w.rows * w.columns) for w in raised)
    left = [divergences[w.module] / (w.rows * w.columns) for w in weights if w.scheme == "int4-gptq"]
    assert all(bound <= least for bound in left)


@pytest.mark.parametrize(("option", "method"), [("auto:4.5", "-gptq"), ("auto:4.5:rtn", "")])
def test_every_blocked_format_is_a_choice(option: str, method: str) -> None:
    budget = parse_quantization([option]).budget
    assert budget is not None
    assert [scheme.name for scheme in budget.blocked] == [f"{name}{method}" for name in _BLOCKED]


@pytest.mark.parametrize(("format", "budget"), [("iq4_nl", 4.5), ("q4_1", 5.0)])
def test_a_weight_gets_the_format_that_holds_it(format: str, budget: float, tmp_path: Path) -> None:
    """Numbers on a format's grid lose nothing in it, and much in formats of similar size."""
    captured, scheme = captured_llama(), parse_scheme(format)
    assert scheme is not None
    names = [name for name in captured.source.names() if name.endswith("_proj.weight") or name == "lm_head.weight"]
    on_grid = {name: round_to_nearest(captured.source.load(name), scheme).values() for name in names}
    source = _Replaced(captured.source, on_grid)
    options: dict[str, Any] = {"calibration": calibration_file(tmp_path), "calibration_sequences": 4}
    weights = quantized(f"auto:{budget}:rtn", captured=Captured(captured.graph, source), **options).graph.quantized
    assert {weight.scheme.partition(":")[0] for weight in weights} == {format}


def test_one_plan_of_blocked_formats_is_carried_out() -> None:
    candidates = [_candidate(*fields) for fields in (("q4_k", 4.5, 2.0), ("int4", 4.1, 3.0), ("iq4_xs", 4.3, 1.5))]
    assert [candidate.name for candidate in least_of_blocked(candidates)] == ["int4", "iq4_xs"]
    assert least_of_blocked(candidates[1:2]) == candidates[1:2]


def _candidate(name: str, bits: float, divergence: float) -> Candidate:
    return Candidate(name, (parse_scheme(name), None), bits, divergence)


class _Replaced:
    """A source with other weights under some names."""

    def __init__(self, source: WeightSource, replaced: dict[str, Tensor]) -> None:
        self._source, self._replaced = source, replaced

    def names(self) -> tuple[str, ...]:
        return self._source.names()

    def load(self, name: str) -> Tensor:
        return self._replaced.get(name, self._source.load(name))


def test_sensitivity_is_what_rounding_a_unit_alone_does(tmp_path: Path) -> None:
    """One run that branches at each unit measures what a run of the whole model with that unit rounded would."""
    calibration = calibration_file(tmp_path)
    planned = quantized("auto:6:rtn", calibration=calibration, calibration_length=64).graph.quantized
    graph, source = captured_llama().graph, captured_llama().source
    ids = torch.tensor(json.loads(Path(calibration).read_text()))[: 4 * 64].split(64)

    def log_probabilities(weights: dict[str, Tensor]) -> Tensor:
        return torch.stack(
            [run_tokens(graph, _Replaced(source, weights), sequence.tolist()).log_softmax(-1) for sequence in ids]
        )[:, ::2]  # Every second token is measured.

    plain = log_probabilities({})
    for unit in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
        names = [f"model.layers.0.self_attn.{module}.weight" for module in unit]
        scheme = parse_scheme("int4:g64")  # the largest groups that divide 64 columns
        assert scheme is not None
        rounded = {n: round_to_nearest(source.load(n), scheme).values() for n in names}
        expected = float((plain.exp() * (plain - log_probabilities(rounded))).sum(-1).mean())
        for weight in planned:
            if f"{weight.module}.weight" in names:
                assert float((weight.reason or "").split()[1]) == pytest.approx(expected, rel=0.02)


_CODED = tuple(f"int{b}{group}{zeros}" for b in (4, 5, 6) for group in (":g64", ":g32") for zeros in ("", ":asym"))
_UNIFORM = (*_CODED, *(f"{scheme},lm_head={scheme}" for scheme in _CODED), "nf4", "int8")


def _bits(result: PipelineResult) -> float:
    weights = result.graph.quantized
    return sum(w.bits * w.rows * w.columns for w in weights) / sum(w.rows * w.columns for w in weights)


@pytest.mark.slow
def test_no_uniform_scheme_that_fits_and_no_smaller_budget_diverges_less(tmp_path: Path) -> None:
    """On the text held apart, of which no weight was rounded with a token."""
    captured = captured_llama()
    given: dict[str, Any] = {"calibration": calibration_file(tmp_path), "calibration_sequences": 12}
    options = parse_options({"calibration_length": 64, **given})
    seen, apart = sequences_and_apart(captured.graph, options, ModelData(captured.source))
    assert len(seen) == 12 and len(apart) == 8
    reference = Reference(captured.graph, captured.source, apart)
    uniform = [quantized(scheme, **given) for scheme in _UNIFORM]
    measured = [(_bits(result), reference.divergence(result.graph)) for result in uniform]
    last = math.inf
    for budget in (4.3, 4.63, 4.8, 6.0, 8.2):
        result = quantized(f"auto:{budget}:rtn", **given)
        divergence = reference.divergence(result.graph)
        assert round(_bits(result), 2) <= budget
        assert divergence <= last
        assert divergence <= min(other for bits, other in measured if round(bits, 2) <= budget)
        assert f"KL {divergence:.2e} on held-out text" in (result.graph.quantized[0].reason or "")
        last = divergence


@pytest.mark.slow
def test_a_trained_model_diverges_less_with_more_bits_on_two_other_texts(bard: Captured) -> None:
    """Nor does a uniform scheme that fits diverge less there."""
    tokenizer = Tokenizer.from_file(str(_MODEL / "tokenizer.json"))
    texts = [(_EXAMPLES / "data" / name).read_text(encoding="utf-8") for name in ("calibration.txt", "heldout.txt")]
    # Their ends: the beginning of the first was looked at.
    tokens = [torch.tensor(tokenizer.encode(text).ids[-8192:]).split(256) for text in texts]
    references = [Reference(bard.graph, bard.source, token) for token in tokens]

    def divergences(result: PipelineResult) -> list[float]:
        return [reference.divergence(result.graph) for reference in references]

    uniform = [
        _quantized(bard, scheme)
        for scheme in (
            "int4-gptq:g64,lm_head=int4-gptq:g64",
            "int4-gptq",
            "int4-gptq:asym",
            "int4-gptq:g32",
            "int5-gptq,lm_head=int5-gptq",
            "int5-gptq",
        )
    ]
    of_uniform = [(_bits(result), divergences(result)) for result in uniform]
    last = [math.inf] * len(texts)
    for budget in (4.25, *sorted(round(bits, 2) for bits, _ in of_uniform[1:])):
        result = _quantized(bard, f"auto:{budget}")
        measured = divergences(result)
        for others in (last, *(other for bits, other in of_uniform if round(bits, 2) <= budget)):
            assert all(ours <= other for ours, other in zip(measured, others, strict=True)), (budget, measured, others)
        last = measured


def _ladder(bits: tuple[float, ...], divergences: tuple[float, ...]) -> list[Rung[Scheme]]:
    return [Rung(None, *rung) for rung in zip(bits, divergences, strict=True)]


def test_what_is_left_goes_to_what_still_fits() -> None:
    large = _ladder((400.0, 450.0, 800.0), (10.0, 8.0, 0.1))
    small = _ladder((40.0, 45.0, 80.0), (2.0, 1.0, 0.9))
    assert spend([large, small], 440.0) == [0, 0]
    assert spend([large, small], 446.0) == [0, 1]
    assert spend([large, small], 500.0) == [1, 1]
    # The step of the small one buys more for its bits, but then the large one's would not fit.
    assert spend([large, small], 840.0) == [2, 0]
    assert spend([large, small], 881.0) == [2, 2]


def test_no_other_choice_within_the_budget_diverges_less() -> None:
    generator = random.Random(0)
    ladders = []
    for _ in range(6):
        steps, divergence = sorted(generator.uniform(1, 50) for _ in range(4)), generator.uniform(0, 1)
        ladders.append(_ladder(tuple(steps), tuple(divergence * generator.uniform(0.8, 1) ** i for i in range(4))))
    for budget in (120.0, 150.0, 200.0):
        chosen = [ladder[i] for ladder, i in zip(ladders, spend(ladders, budget), strict=True)]
        assert sum(rung.bits for rung in chosen) <= budget
        # Costs are rounded up to parts of the budget, which is why the others get a little less of it.
        others = (choice for choice in product(*ladders) if sum(rung.bits for rung in choice) <= budget * 0.999)
        least = min(sum(rung.divergence for rung in choice) for choice in others)
        assert sum(rung.divergence for rung in chosen) <= least + 1e-9


@pytest.mark.slow
def test_leaves_rules_alone_and_counts_their_bits(bard: Captured) -> None:
    weights = _quantized(bard, "auto:7:rtn,lm_head=int8").graph.quantized
    elements = sum(w.rows * w.columns for w in weights)
    assert next(w for w in weights if w.module == "lm_head").reason is None
    assert sum(w.bits * w.rows * w.columns for w in weights) / elements <= 7.0


def test_says_what_the_least_budget_is(bard: Captured) -> None:
    with pytest.raises(OptionError, match=r"all at 4 bits, with scales, take 4\.1") as caught:
        _quantized(bard, "auto:4.05")
    assert caught.value.fix == "give at least auto:4.13"


def test_deep_models_are_measured_on_fewer_tokens() -> None:
    """Bounded work: a model of twice as many weights reads half of the tokens for each."""
    sequences = [torch.arange(256)] * 8
    assert [len(measured_on(sequences, units)) for units in (1, 32, 33, 61, 121, 10_000)] == [4, 4, 3, 2, 1, 1]
    assert all(len(sequence) == 128 for sequence in measured_on(sequences, 25))


def test_errors_alone_are_measured_on_the_beginning_of_the_text() -> None:
    sequences = (torch.arange(100), torch.arange(200), torch.arange(300))
    assert errors_measured_on(sequences) == sequences[:2]
    assert errors_measured_on(()) == ()
