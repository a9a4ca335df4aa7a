"""Several choices, log-probabilities, beams and caches over a real (reference) executor."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llmc.errors import ModelFailureError, RequestError
from llmc.runtime.engine import Engine
from llmc.runtime.grammar.grammar import Grammar, GrammarKind
from llmc.runtime.loading import load
from llmc.runtime.requests.completion import Completion
from llmc.runtime.sampling.logprobs import likeliest, token_logprobs
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.quick_sample import quick_sample
from tests.runtime.tiny_engine import LIMITS, VOCAB, mild_model, tiny_model, write_tiny_engine

PROMPTS = [[5, 9, 2] * 7, [11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 8], [40, 41, 42, 43], [77] * 27]
ONE_SEQUENCE = 5 * 512


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("engine") / "mild.llmc", model=mild_model())


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with load(path) as opened:
        yield opened


def tokens_of(completion: Completion) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in completion.choices]


def test_each_choice_draws_from_its_own_stream_of_the_seed(engine: Engine) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=7, n=3)
    (three,) = engine.generate(PROMPTS[0], params)
    assert len(set(tokens_of(three))) == 3
    (alone,) = engine.generate(PROMPTS[0], replace(params, n=1))
    assert tokens_of(three)[0] == alone.token_ids
    assert engine.generate(PROMPTS, params) == [engine.generate(p, params)[0] for p in PROMPTS]
    assert len(set(tokens_of(engine.generate(PROMPTS[0], replace(params, seed=None))[0]))) == 3


@pytest.mark.parametrize("kv_cache_bytes", quick_sample([ONE_SEQUENCE, 2 * ONE_SEQUENCE], [ONE_SEQUENCE]))
@pytest.mark.parametrize("params", [{"n": 4, "temperature": 1.0, "seed": 3}, {"n": 2, "beam_width": 4}])
def test_forks_and_beams_survive_preemption(path: Path, kv_cache_bytes: int, params: dict[str, Any]) -> None:
    with load(path) as roomy, load(path, kv_cache_bytes=kv_cache_bytes) as tight:
        wanted = roomy.generate(PROMPTS, SamplingParams(max_tokens=11, **params))
        completions = tight.generate(PROMPTS, SamplingParams(max_tokens=11, **params))
        assert [tokens_of(c) for c in completions] == [tokens_of(c) for c in wanted]
        assert tight.loop.scheduler.preemptions > 0
        assert tight.loop.pool.used == roomy.loop.pool.used == 0


def test_more_beams_and_choices_than_seats(engine: Engine) -> None:
    (beams,) = engine.generate(PROMPTS[0], SamplingParams(max_tokens=6, n=7, beam_width=7, logprobs=1))
    totals = [choice.cumulative_logprob for choice in beams.choices]
    assert len(set(tokens_of(beams))) == 7 and totals == sorted(totals, key=lambda t: -(t or 0.0))
    for choice in beams.choices:
        expected = mild_model().logits([*PROMPTS[0], *choice.token_ids]).log_softmax(-1)[len(PROMPTS[0]) - 1 :]
        wanted = sum(float(row[token]) for row, token in zip(expected, choice.token_ids, strict=False))
        assert choice.cumulative_logprob == pytest.approx(wanted, abs=1e-4)
    params = SamplingParams(max_tokens=6, n=9, temperature=1.0, seed=1)
    (several,) = engine.generate(PROMPTS[0], params)
    assert tokens_of(several)[:4] == tokens_of(engine.generate(PROMPTS[0], replace(params, n=4))[0])
    assert engine.loop.scheduler.idle and engine.loop.pool.used == 0


def test_choices_end_each_in_its_own_way(engine: Engine) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=7, n=3)
    plain = tokens_of(engine.generate(PROMPTS[2], params)[0])
    stop = plain[1][2]
    (stopped,) = engine.generate(PROMPTS[2], replace(params, stop_token_ids=(stop,)))
    for choice, tokens in zip(stopped.choices, plain, strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert choice.token_ids == tokens[:end]
        assert (choice.finish_reason, choice.stop_reason) == (("stop", stop) if stop in tokens else ("length", None))


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    prompt = PROMPTS[2]
    params = SamplingParams(
        max_tokens=6, temperature=0.7, seed=1, repetition_penalty=1.5, logprobs=3, prompt_logprobs=2
    )
    (completion,) = engine.generate(prompt, params)
    sequence = [*prompt, *completion.token_ids]
    expected = mild_model().logits(sequence).log_softmax(-1).numpy()
    assert completion.prompt_logprobs is not None and completion.prompt_logprobs[0] is None
    choice = completion.choices[0]
    assert choice.logprobs is not None and len(choice.logprobs) == 6
    everything = [*completion.prompt_logprobs[1:], *choice.logprobs]
    for position, entry in enumerate(everything):
        assert entry is not None
        row = expected[position]
        token = sequence[position + 1]
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())
        count = 2 if position < len(prompt) - 1 else 3
        assert [i for i, _ in entry.top] == likeliest(row, count).tolist()
    assert choice.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in choice.logprobs))
    (bare,) = engine.generate(prompt, replace(params, logprobs=0, prompt_logprobs=None))
    assert bare.choices[0].token_ids == choice.token_ids and bare.choices[0].logprobs is not None
    assert [logprob.top for logprob in bare.choices[0].logprobs] == [()] * 6


def test_a_prompt_can_be_scored_without_generating(engine: Engine) -> None:
    for prompt in (PROMPTS[0], [1] * LIMITS.max_model_len):
        (completion,) = engine.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert completion.token_ids == () and completion.finish_reason == "length"
        assert completion.prompt_logprobs is not None and len(completion.prompt_logprobs) == len(prompt)
        (several,) = engine.generate(PROMPTS[1], SamplingParams(max_tokens=0))
        assert several.token_ids == ()


def test_best_of_gives_the_likeliest_first(engine: Engine) -> None:
    params = SamplingParams(max_tokens=7, temperature=1.0, seed=2, n=6, logprobs=0)
    choices = engine.generate(PROMPTS[4], params)[0].choices
    ranked = sorted(choices, key=lambda c: -(c.cumulative_logprob or 0) / len(c.token_ids))
    (best,) = engine.generate(PROMPTS[4], replace(params, n=2, best_of=6, logprobs=None))
    assert [c.token_ids for c in best.choices] == [c.token_ids for c in ranked[:2]]
    assert best.choices[0].logprobs is None


def hf_beams(prompt: list[int], width: int, count: int, **options: Any) -> list[list[int]]:
    """What Hugging Face's beam search finds with the same model."""
    # As Any: transformers' own types do not allow for a model made like this.
    hf: Any = importlib.import_module("transformers")
    outputs: Any = importlib.import_module("transformers.modeling_outputs")
    model = mild_model()

    def forward(self: Any, input_ids: Any, **ignored: Any) -> Any:
        return outputs.CausalLMOutput(logits=torch.stack([model.logits(row.tolist()) for row in input_ids]))

    def prepared(self: Any, input_ids: Any, **ignored: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    members = {
        "config_class": hf.PretrainedConfig,
        "forward": forward,
        "prepare_inputs_for_generation": prepared,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
    }
    wrapped: Any = type("Wrapped", (hf.PreTrainedModel, hf.GenerationMixin), members)
    generation = hf.GenerationConfig(
        num_beams=width,
        num_return_sequences=count,
        do_sample=False,
        use_cache=False,
        pad_token_id=96,
        **options,
    )
    config = hf.PretrainedConfig(vocab_size=VOCAB, is_encoder_decoder=False)
    rows = wrapped(config).eval().generate(torch.tensor([prompt]), generation_config=generation)
    return [row[len(prompt) :].tolist() for row in rows]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("prompt", [[5, 9, 2], [40, 41, 42, 43]])
def test_beam_search_is_hugging_faces(engine: Engine, prompt: list[int], length_penalty: float, early: bool) -> None:
    greedy = engine.generate(prompt, SamplingParams(max_tokens=8, n=3, beam_width=4))[0]
    ends = sorted({greedy.choices[0].token_ids[3], greedy.choices[1].token_ids[5]})
    wanted = hf_beams(
        prompt, 4, 3, max_new_tokens=8, eos_token_id=ends, length_penalty=length_penalty, early_stopping=early
    )
    params = SamplingParams(
        max_tokens=8,
        n=3,
        beam_width=4,
        length_penalty=length_penalty,
        early_stopping=early,
        stop_token_ids=tuple(ends),
        logprobs=1,
    )
    (completion,) = engine.generate(prompt, params)
    trimmed = [[*row[: min((row.index(e) + 1 for e in ends if e in row), default=len(row))]] for row in wanted]
    assert [list(tokens) for tokens in tokens_of(completion)] == trimmed
    for choice in completion.choices:
        assert choice.logprobs is not None and choice.cumulative_logprob is not None
        assert choice.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in choice.logprobs))


def test_penalized_beams_are_hugging_faces(engine: Engine) -> None:
    plain = engine.generate([5, 9, 2], SamplingParams(max_tokens=8, beam_width=4))[0].token_ids
    bias = {plain[0]: -2.0, 17: 1.5}
    wanted = hf_beams(
        [5, 9, 2],
        4,
        3,
        max_new_tokens=8,
        repetition_penalty=1.4,
        sequence_bias=[[[token], value] for token, value in bias.items()],
    )
    params = SamplingParams(max_tokens=8, n=3, beam_width=4, repetition_penalty=1.4, logit_bias=bias, logprobs=0)
    (completion,) = engine.generate([5, 9, 2], params)
    assert [list(tokens) for tokens in tokens_of(completion)] == wanted
    assert completion.token_ids != plain
    rows = engine.logits([5, 9, 2, *completion.token_ids])[2:]
    logs = np.log(np.exp(rows.astype(np.float64)).sum(-1))
    given = [row[token] - log for row, token, log in zip(rows, completion.token_ids, logs, strict=False)]
    assert completion.choices[0].cumulative_logprob == pytest.approx(sum(given), abs=1e-4), "before penalties"


def test_penalties_on_the_output_and_a_least_length_hold_for_beams(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, n=2, beam_width=3, frequency_penalty=50.0)
    for tokens in tokens_of(engine.generate([8, 8], params)[0]):
        assert len(set(tokens)) == len(tokens) == 10
    first = engine.generate([8, 8], SamplingParams(max_tokens=10, beam_width=3))[0].token_ids[0]
    longer = SamplingParams(max_tokens=10, beam_width=3, stop_token_ids=(first,), min_tokens=4)
    assert len(engine.generate([8, 8], longer)[0].token_ids) >= 4


def test_a_stop_string_ends_a_beam(tmp_path: Path) -> None:
    model = mild_model(1, 4096)
    plain = SamplingParams(max_tokens=12, n=3, beam_width=3, ignore_eos=True)
    with load(write_tiny_engine(tmp_path / "speaking.llmc", model=model, with_tokenizer=True)) as speaking:
        before = speaking.generate("The king", plain)[0].choices[0]
        # Its first token is among the three likeliest.
        stop = before.text[0]
        (completion,) = speaking.generate("The king", replace(plain, stop=(stop,)))
        assert any(choice.stop_reason == stop for choice in completion.choices)
        for choice in completion.choices:
            assert stop not in choice.text
            assert (choice.finish_reason == "stop") == (choice.stop_reason == stop)
            if choice.stop_reason == stop:
                assert speaking.detokenize(choice.token_ids).startswith(choice.text + stop)
                assert stop not in speaking.detokenize(choice.token_ids[:-1])


def test_a_prefix_hit_changes_no_token(path: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=5)
    with load(path) as cached, load(path, prefix_cache=False) as fresh:
        system = [7] * 17
        for tail in ([1, 2], [3], [1, 2], [9] * 9):
            (actual,), (wanted,) = (opened.generate([*system, *tail], params) for opened in (cached, fresh))
            assert actual == wanted
        assert actual.cached_tokens == 16 and wanted.cached_tokens == 0
        turn = [*system, 9, *cached.generate([*system, 9], params)[0].token_ids, 4]
        (following,) = cached.generate(turn, params)
        assert following == fresh.generate(turn, params)[0]
        assert following.cached_tokens == (len(turn) - 1) // 8 * 8


def test_blocks_of_broken_logits_are_not_cached(tmp_path: Path) -> None:
    model = tiny_model()
    model.weights["embedding"][13] = float("nan")
    with load(write_tiny_engine(tmp_path / "nan.llmc", model=model)) as engine:
        early = [1, 2, 3, 13, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8]
        late = [1, 2, 3, 4, 5, 6, 7, 8] * 2
        # A step has 16 tokens: it ends a token before the prompt does, or two.
        for prompt in ([*early, 5], [*early, 5, 9], [*late, 13, 5]):
            for params in (
                SamplingParams(),
                SamplingParams(n=2, temperature=1.0),
                SamplingParams(beam_width=2),
                SamplingParams(max_tokens=1, logprobs=1),
                SamplingParams(prompt_logprobs=0),
                SamplingParams(max_tokens=0),
                SamplingParams(max_tokens=0, prompt_logprobs=0),
            ):
                with pytest.raises(ModelFailureError, match="no usable logits"):
                    engine.generate(prompt, params)
                assert engine.loop.pool.cached == engine.loop.pool.used == 0
        # Every block of the pool has held NaNs by now; nobody may read what he has not written.
        completions = engine.generate([[5, 9, 2], [3] * 9], SamplingParams(max_tokens=12))
        assert [list(c.token_ids) for c in completions] == [model.greedy([5, 9, 2], 12), model.greedy([3] * 9, 12)]


def test_answers_without_chance_are_kept(path: Path) -> None:
    with load(path, output_cache_bytes=20_000) as engine:
        seeded = SamplingParams(max_tokens=5, temperature=1.0, seed=1, n=2, logprobs=1)
        chance = SamplingParams(max_tokens=5, temperature=1.0)
        first = engine.generate([[1, 2], [3]], seeded)
        steps = engine.loop.scheduler.prefix_cache.queries
        assert engine.generate([[1, 2], [3]], seeded) == first
        assert engine.loop.scheduler.prefix_cache.queries == steps, "nothing was computed"
        engine.generate([4], chance)
        engine.generate([4], chance)
        assert engine.output_cache is not None
        stats = engine.output_cache.stats()
        assert (stats.queries, stats.hits, stats.entries) == (4, 2, 2)
        for token in range(5, 15):
            engine.generate([token], seeded)
        stats = engine.output_cache.stats()
        assert stats.bytes <= 20_000 and 1 <= stats.entries < 10
    with load(path) as engine:
        assert engine.output_cache is None


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"n": 300}, "n cannot be 300"),
        ({"best_of": 2, "n": 3}, "best_of cannot be 2"),
        ({"logprobs": 1000}, "logprobs cannot be 1000"),
        ({"prompt_logprobs": 129}, "prompt_logprobs cannot be 129"),
        ({"beam_width": 2, "temperature": 1.0}, "temperature cannot be 1.0"),
        ({"beam_width": 2, "n": 3}, "beam_width cannot be 2"),
        ({"beam_width": 2, "seed": 1}, "seed cannot be 1"),
        ({"beam_width": 2, "grammar": Grammar(GrammarKind.REGEX, "a")}, "grammar cannot be"),
        ({"beam_width": 2, "prompt_logprobs": 0}, "prompt_logprobs cannot be 0"),
        ({"grammar": "x"}, "grammar cannot be 'x'"),
        ({"grammar": Grammar(GrammarKind.REGEX, "a")}, "a grammar needs a tokenizer"),
    ],
)
def test_impossible_parameters_are_refused(engine: Engine, params: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=re.escape(problem)) as caught:
        engine.generate([1], SamplingParams(**params))
    assert caught.value.fix


def test_a_stream_has_one_choice(engine: Engine) -> None:
    with pytest.raises(RequestError, match="a stream returns one choice, but 2 were requested"):
        engine.stream([1], SamplingParams(n=2, temperature=1.0))


def test_token_logprobs_of_a_row() -> None:
    row = np.array([1.0, 3.0, 3.0, -np.inf, 2.0], np.float32)
    logprobs = token_logprobs(row, 4, 3)
    total = math.log(math.exp(1) + 2 * math.exp(3) + math.exp(2))
    assert logprobs.rank == 3 and logprobs.logprob == pytest.approx(2 - total)
    assert [i for i, _ in logprobs.top] == [1, 2, 4]
    assert SimpleNamespace(top=token_logprobs(row, 3, 0).top).top == ()
