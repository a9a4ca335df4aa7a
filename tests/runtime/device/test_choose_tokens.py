"""Tokens chosen by a GPU program, interpreted: as the host would choose from the same logits, whoever else is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.codegen.target_kind import kind_of
from llmc.codegen.triton.lowering import lower_device
from llmc.compiler import packed
from llmc.errors import ModelFailureError
from llmc.graph.finite_weights import FiniteWeights
from llmc.options import BuildOptions
from llmc.program import Launch, Program, StepOutput
from llmc.program.launch_arguments import Operand
from llmc.runtime.executors.executor import ChoosingExecutor, LaunchTime, Logits
from llmc.runtime.executors.triton_interpreter import TritonInterpreterExecutor
from llmc.runtime.loop.step import Step
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation, Scoring
from llmc.runtime.requests.request import Origin, Request
from llmc.runtime.sampling.row_choice import BEST, RowChoice, least_wanted
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.sampling.token_filters import candidates
from tests.codegen.tiny_models import CHANNELS, VOCABULARY, GraphBuilder, aten, ops
from tests.gpu_target import gpu_target

BLOCKS = 64
OPTIONS = BuildOptions(max_model_len=64, max_batch_tokens=64, max_sequences=8, max_logit_rows=16)
PROMPTS = ([5, 9, 2] * 4, [11], [3, 1, 4, 1, 5], [8, 8], [40, 41, 42], [7] * 9)


class Recorded(TritonInterpreterExecutor):
    """An executor that notes what steps were asked for and whether logits travelled."""

    def __init__(self, program: Program, directory: Path, weights: dict[str, torch.Tensor], blocks: int) -> None:
        super().__init__(program, directory, weights, blocks)
        self.asked: list[str] = []

    def weight(self, name: str) -> torch.Tensor:
        return self._memory["weight", name]

    def logits(self, first: int, count: int) -> Logits:
        self.asked.append("logits")
        return super().logits(first, count)

    def launch_all(self, step: Step, wanted: StepOutput) -> tuple[LaunchTime, ...]:
        self.asked.append(wanted.value)
        return super().launch_all(step, wanted)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """lm_head with argmax is one product."""
    return interpreted(tmp_path_factory.mktemp("plain"), is_capped=False)


@pytest.fixture(scope="module")
def capping(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Logits are capped after the product, so that they are written."""
    return interpreted(tmp_path_factory.mktemp("capped"), is_capped=True)


def interpreted(directory: Path, is_capped: bool) -> Recorded:
    """A model whose next token follows from the last one and its position: the fewest launches to interpret."""
    b = GraphBuilder(torch.float32)
    tokens = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("wte", VOCABULARY, CHANNELS, scale=1.0))
    places = b.call(ops.embedding.default, b.inputs["positions"], b.weight("wpe", 64, CHANNELS, scale=1.0))
    rows = b.call(ops.select_rows.default, b.call(aten.add.Tensor, tokens, places), b.inputs["logit_rows"])
    logits = b.call(ops.lm_head.default, rows, b.weight("head", VOCABULARY, CHANNELS))
    if is_capped:
        logits = b.call(aten.tanh.default, b.call(aten.div.Tensor, logits, 3.0))
    graph, source = b.finish(logits)
    lowered = lower_device(graph, gpu_target("h100"), OPTIONS)
    for name, text in lowered.sources.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    pairs = zip(lowered.program.weights, lowered.recipes, strict=True)
    weights = {s.name: packed(s, r, source, FiniteWeights(), kind_of(gpu_target("h100"))) for s, r in pairs}
    return Recorded(lowered.program, directory, weights, BLOCKS)


def generation(prompt: list[int], params: SamplingParams) -> Generation:
    sampler = Sampler(params, np.asarray(prompt, np.int64), VOCABULARY, np.zeros(0, np.int64))
    ending = Ending(frozenset(), frozenset(), len(prompt) + params.max_tokens)
    return Generation(prompt, sampler, ending, origin=Origin(salt=None))


def run(executor: Recorded, requests: Sequence[Request]) -> None:
    loop = StepLoop(executor, executor.limits, BLOCKS, program=None)
    for request in requests:
        loop.add(request)
    while not all(request.finished for request in requests):
        loop.step()


def outputs(executor: Recorded, requests: list[Generation]) -> list[tuple[int, ...]]:
    """What the requests generate together."""
    executor.asked.clear()
    run(executor, requests)
    return [request.output for request in requests]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count)


def on_host(params: SamplingParams) -> SamplingParams:
    """The same choice, which only the host can make."""
    return SamplingParams(max_tokens=params.max_tokens, temperature=params.temperature, logit_bias={0: 0.0})


def test_the_interpreter_chooses() -> None:
    assert issubclass(TritonInterpreterExecutor, ChoosingExecutor)


@pytest.mark.parametrize("name", ["executor", "capping"])
def test_greedy_tokens_are_the_hosts_and_no_logits_travel(name: str, request: pytest.FixtureRequest) -> None:
    """More requests than a vector product takes, then fewer."""
    executor: Recorded = request.getfixturevalue(name)
    for prompts in (PROMPTS, PROMPTS[2:4]):
        chosen = outputs(executor, [generation(p, greedy(2)) for p in prompts])
        assert set(executor.asked) == {"best"}
        assert chosen == outputs(executor, [generation(p, on_host(greedy(2))) for p in prompts])
        assert "best" not in executor.asked and "logits" in executor.asked


def test_requests_that_need_logits_get_them_beside_ones_that_do_not(executor: Recorded) -> None:
    prompts = PROMPTS[:3]
    alone = outputs(executor, [generation(p, greedy(2)) for p in prompts])
    mixed = [generation(p, greedy(2)) for p in prompts[:2]]
    mixed.append(generation(prompts[2], on_host(greedy(2))))
    assert outputs(executor, mixed) == alone
    assert set(executor.asked) == {"drawn", "logits"}
    scoring = Scoring(prompts[0], VOCABULARY)
    together: list[Request] = [scoring, generation(prompts[1], greedy(2))]
    run(executor, together)
    assert np.isfinite(scoring.logits).all()
    assert isinstance(together[1], Generation) and together[1].output == alone[1]


FILTERS = [
    SamplingParams(max_tokens=2, seed=1, temperature=0.9),
    SamplingParams(max_tokens=2, seed=2, temperature=0.7, top_k=5),
    SamplingParams(max_tokens=2, seed=3, temperature=1.3, top_k=20, top_p=0.5),
    SamplingParams(max_tokens=2, seed=4, temperature=0.8, min_p=0.2),
]


def test_draws_do_not_depend_on_neighbours(executor: Recorded) -> None:
    def requests() -> list[Generation]:
        return [generation(p, q) for p, q in zip(PROMPTS[:5], [*FILTERS, greedy(2)], strict=True)]

    together = outputs(executor, requests())
    assert set(executor.asked) == {"filtered"}
    # Not all of them: interpreted steps are slow.
    assert together[1:3] == [outputs(executor, [request])[0] for request in requests()[1:3]]


def test_filters_keep_what_the_host_keeps(executor: Recorded) -> None:
    """Every token drawn is among the host's candidates for the logits of the same place."""
    requests = [generation(PROMPTS[3], params) for params in FILTERS]
    outputs(executor, requests)
    scorings = [Scoring(request.tokens, VOCABULARY) for request in requests]
    run(executor, scorings)
    for request, scoring, params in zip(requests, scorings, FILTERS, strict=True):
        for place in range(request.prompt_tokens, len(request.tokens)):
            logits = scoring.logits[place - 1]
            kept, _ = candidates(logits, int(logits.argmax()), params)
            assert kept is None or request.tokens[place] in kept


def test_a_row_that_is_left_open_is_drawn_by_the_host(executor: Recorded) -> None:
    """top-p of a flat distribution keeps more tokens than there are candidates."""
    params = SamplingParams(max_tokens=1, temperature=1e4, top_p=0.99, seed=1)
    (output,) = outputs(executor, [generation([5], params)])
    assert len(output) == 1
    assert executor.asked == ["filtered", "logits"]


@pytest.mark.parametrize("params", [replace(params, max_tokens=1) for params in (greedy(1), *FILTERS[:2])])
def test_unusable_logits_end_their_request_alone_and_nan_is_told_from_infinity(
    params: SamplingParams, tmp_path: Path
) -> None:
    executor = interpreted(tmp_path, is_capped=False)
    tokens, head = (executor.weight(name).view(VOCABULARY, CHANNELS) for name in ("wte", "head"))
    head[7, 0] = 100.0
    sound = outputs(executor, [generation([5], params)])
    tokens[13] = float("nan")
    tokens[14] = torch.tensor([3e38] + [0.0] * (CHANNELS - 1))
    requests = [generation([token], params) for token in (13, 5, 14)]
    assert outputs(executor, requests)[1:2] == sound
    assert [request.error is None for request in requests] == [False, True, False]
    assert isinstance(requests[0].error, ModelFailureError) and isinstance(requests[2].error, ModelFailureError)
    assert "NaN (not a number), the first at token id 0" in requests[0].error.problem
    assert "+inf at token id 7" in requests[2].error.problem


@pytest.mark.parametrize(
    ("choices", "wanted"),
    [
        ([BEST, BEST], StepOutput.BEST),
        ([BEST, None], StepOutput.DRAWN),
        ([RowChoice(0.5, 2**31 - 1, 1.0, 0.0, 1, 2), BEST], StepOutput.DRAWN),
        ([RowChoice(0.5, 2**31 - 1, 0.9, 0.0, 1, 2), None], StepOutput.FILTERED),
        ([RowChoice(0.5, 40, 1.0, 0.0, 1, 2)], StepOutput.FILTERED),
        ([RowChoice(0.0, 40, 0.5, 0.1, 1, 2)], StepOutput.BEST),
    ],
)
def test_a_step_does_no_more_than_its_rows_need(choices: list[RowChoice | None], wanted: StepOutput) -> None:
    assert least_wanted(choices) is wanted


@pytest.mark.parametrize(("name", "is_fused"), [("executor", True), ("capping", False)])
def test_each_kind_of_step_has_its_launches(name: str, is_fused: bool, request: pytest.FixtureRequest) -> None:
    launches = request.getfixturevalue(name).program.launches
    by_kind = {w: [x for x in launches if x.runs(tokens=2, logit_rows=2, wanted=w)] for w in StepOutput}
    assert len(by_kind[StepOutput.LOGITS]) < len(by_kind[StepOutput.DRAWN]) < len(by_kind[StepOutput.FILTERED])

    def writes_logits(launch: Launch) -> bool:
        return any(isinstance(a, Operand) and a.name == "logits" for a in launch.arguments.values())

    assert any(map(writes_logits, by_kind[StepOutput.BEST])) != is_fused
    assert any("best_" in launch.kernel for launch in by_kind[StepOutput.BEST]) == is_fused
