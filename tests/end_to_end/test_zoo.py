"""Every architecture of docs/models.md: engines for CPUs equal transformers, however prompts are cut and whoever runs
beside them; and what the page calls refused is."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc import SamplingParams
from llmc.architectures.tiny_config import tiny_architecture
from llmc.runtime.engine import Engine
from tests.end_to_end.models_page import listed
from tests.quick_sample import quick_sample
from tests.tolerances import ENGINES

LENGTHS = (1, 7, 33, 70)
GENERATED = 64
# Latents, states and experts in one model.
QUICK = ("bailing_hybrid",)


@dataclass(frozen=True)
class Case:
    model: Any
    engine: Path
    seed: str

    def prompt(self, length: int) -> list[int]:
        chance = random.Random(f"{self.seed} {length}")
        return [chance.randrange(3, 150) for _ in range(length)]

    def expected(self, tokens: list[int]) -> Any:
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()


@pytest.fixture(scope="module", params=quick_sample(listed("Compile and match"), QUICK))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name: str = request.param
    model, path = tiny_architecture(name), tmp_path_factory.mktemp("zoo") / "engine.llmc"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", llmc.errors.BuildWarning)
        llmc.build(model, path, dtype="float32", max_model_len=160, max_sequences=8, max_batch_tokens=80)
    yield Case(model, path, name)


def test_logits_are_those_of_transformers_however_a_prompt_is_cut(case: Case) -> None:
    with llmc.load(case.engine) as whole, llmc.load(case.engine, max_step_tokens=5, threads=1) as cut:
        for length in LENGTHS:
            tokens = case.prompt(length)
            expected, actual = case.expected(tokens), whole.logits(tokens)
            assert np.abs(actual - expected).max() <= ENGINES * expected.std()
            assert np.array_equal(cut.logits(tokens), actual)


def test_greedy_text_is_that_of_transformers(case: Case) -> None:
    # RoBERTa and its like number tokens without the padding's, which is no token of a text.
    padding = getattr(case.model.config.get_text_config(), "pad_token_id", None)
    never = {} if padding is None else {padding: -100.0}
    params = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True, logit_bias=never)
    prompts = [case.prompt(9), case.prompt(33)]
    with llmc.load(case.engine) as engine:
        for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
            answer = list(completion.choices[0].token_ids)
            # What it says next after each token of its own answer: one pass shows all 64.
            logits = case.expected([*prompt, *answer])[len(prompt) - 1 : -1]
            logits[:, list(never)] = logits.min()
            behind = logits.max(-1) - np.take_along_axis(logits, np.array(answer)[:, None], -1)[:, 0]
            # The likeliest, or one that is as likely as these logits can tell.
            assert len(answer) == GENERATED and behind.max() <= ENGINES * logits.std()


def test_neighbours_chunks_and_preemption_change_no_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [case.prompt(length) for length in (5, 70, 1, 26, 43)]
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, n=2, logprobs=1, ignore_eos=True)
    with llmc.load(case.engine, prefix_cache=False) as engine:
        alone = [bits(engine, [prompt], params)[0] for prompt in prompts]
        assert bits(engine, prompts, params) == alone
    chance = random.Random(case.seed)
    with llmc.load(case.engine, max_step_tokens=chance.randint(9, 40), prefix_cache=False) as engine:
        monkeypatch.setattr(engine.loop, "step", interrupted(engine, chance))
        assert bits(engine, prompts, params) == alone
        assert engine.loop.scheduler.preemptions > 0


def interrupted(engine: Engine, chance: random.Random) -> Callable[[], Any]:
    """Its step, before the fourth and every sixth on average all requests give way, as if the memory had run out."""
    step, steps = engine.loop.step, itertools.count(1)

    def preempting() -> Any:
        if next(steps) == 4 or chance.random() < 1 / 6:
            engine.loop.scheduler.preempt_all()
        return step()

    return preempting


def bits(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[object]:
    """Everything that was computed, to the last bit."""
    return [
        [(c.token_ids, [(p.logprob.hex(), p.top) for p in c.logprobs or ()]) for c in completion.choices]
        for completion in engine.generate(prompts, params)
    ]


@pytest.mark.parametrize("name", quick_sample(listed("Refused"), ()))
def test_what_is_refused_is_an_error_with_a_place_and_a_fix(name: str, tmp_path: Path) -> None:
    with pytest.raises(llmc.LlmcError) as caught:
        llmc.build(tiny_architecture(name), tmp_path / "engine.llmc", dtype="float32", max_model_len=160)
    # Nobody knows which line asked how many tokens there are, only the answer.
    assert caught.value.at or "takes another branch for fewer" in caught.value.problem
    assert caught.value.fix and not list(tmp_path.iterdir())
