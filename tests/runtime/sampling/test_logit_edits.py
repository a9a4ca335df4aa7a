"""DRY, banned words, allowed tokens and users' functions against plain loops, alone and with every other option."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import RequestError
from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.runtime.requests.completion import Completion
from llmc.runtime.sampling.dry_penalty import LONGEST_EXCESS, DryPenalty, breaker_tokens
from llmc.runtime.sampling.logit_edits import BannedSequences, bad_word_sequences, logit_edits
from llmc.runtime.sampling.row_choice import BEST
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import DRY_BREAKERS, SamplingParams
from llmc.runtime.sampling.written_tokens import Written
from llmc.runtime.text.tokenizer import Tokenizer
from tests.listed_files import listed_files
from tests.runtime.sampling.letters import NO_IDS, VOCAB, Letters, NoTokenizer, Row, double_or_ban
from tests.runtime.tiny_engine import TOKENIZER, mild_model, write_tiny_engine


def dry_by_definition(scores: Row, ids: Sequence[int], params: SamplingParams, breakers: set[int]) -> None:
    """For every token: the longest way to have come to it before, as now; text-generation-webui's loops."""
    if params.dry_penalty_last_n is not None:
        ids = ids[len(ids) - min(len(ids), params.dry_penalty_last_n) :]
    for token in range(len(scores)):
        longest = 0
        for place in range(1, len(ids)):
            if ids[place] != token or token in breakers:
                continue
            length = 0
            while length < place and ids[place - 1 - length] == ids[-1 - length] and ids[-1 - length] not in breakers:
                length += 1
            longest = max(longest, length)
        if longest >= params.dry_allowed_length:
            scores[token] -= params.dry_multiplier * params.dry_base ** (longest - params.dry_allowed_length)


def adjusted_by_definition(
    logits: Row, prompt: list[int], output: list[int], params: SamplingParams, function: Callable[..., Any] | None
) -> npt.NDArray[np.float64]:
    """What the sampler's docstring says, token by token."""
    scores = logits.astype(np.float64)
    for token in range(VOCAB):
        if token in prompt + output:
            penalty = params.repetition_penalty
            scores[token] *= penalty if scores[token] < 0 else 1 / penalty
        if token in output:
            scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
        scores[token] += params.logit_bias.get(token, 0.0)
    if params.dry_multiplier:
        breakers = {ord(breaker) - ord("a") for breaker in params.dry_sequence_breakers}
        dry_by_definition(scores, prompt + output, params, breakers)  # type: ignore[arg-type]
    if function is not None:
        scores = function(prompt + output, scores.astype(np.float32)).astype(np.float64)
    for word in params.bad_words:
        *beginning, last = (ord(letter) - ord("a") for letter in word if letter != " ")
        if output[len(output) - len(beginning) :] == beginning and len(output) >= len(beginning):
            scores[last] = -np.inf
    for token in range(VOCAB):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = -np.inf
    if len(output) < params.min_tokens:
        scores[[0, 1]] = -np.inf
    return scores


words = st.lists(st.text("abcd", min_size=1, max_size=3), max_size=3)
options = st.fixed_dictionaries(
    {},
    optional={
        "dry_multiplier": st.sampled_from([0.0, 0.8, 3.0]),
        "dry_base": st.sampled_from([1.0, 1.75]),
        "dry_allowed_length": st.integers(1, 4),
        "dry_penalty_last_n": st.none() | st.integers(0, 20),
        "dry_sequence_breakers": st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
        "bad_words": words,
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=VOCAB, unique=True),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-0.5, 0.5]),
        "frequency_penalty": st.sampled_from([0.25]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-2.0, 2.0]), max_size=2),
        "min_tokens": st.integers(0, 4),
    },
)


@settings(max_examples=120)
@given(st.integers(0, 10_000), options, st.booleans())
def test_every_combination_is_the_definitions(seed: int, values: dict[str, Any], with_function: bool) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 4, rng.integers(1, 12)).tolist()
    function = double_or_ban if with_function else None
    params = SamplingParams(max_tokens=100, logits_processors=(function,) if function else (), **values)
    edits = logit_edits(params, Letters(), VOCAB)
    ours = Sampler(params, np.array(prompt), VOCAB, np.array([0, 1]), edits=edits)
    output: list[int] = []
    for _ in range(12):
        # Few tokens are likely, so that much is repeated.
        logits = (rng.normal(0, 1, VOCAB) + np.where(np.arange(VOCAB) < 4, 4, 0)).astype(np.float32)
        wanted = adjusted_by_definition(logits, prompt, output, params, function)
        if not params.changes_logits() and not edits:
            wanted = logits.astype(np.float64)
        np.testing.assert_allclose(ours.adjusted(logits), wanted, rtol=1e-5, atol=1e-5)
        if wanted.max() == -np.inf:
            with pytest.raises(RequestError, match="no token is allowed next"):
                ours.sample(logits)
            return
        output.append(ours.sample(logits))
        assert wanted[output[-1]] >= wanted.max() - 1e-4


def written(ids: Sequence[int]) -> Written:
    return Written(np.array(ids, np.int64), 0)


def test_a_long_repetition_costs_what_its_longest_part_does() -> None:
    dry = DryPenalty(1.0, 1.75, 2, frozenset(), None)
    short, long = (dry(np.zeros(VOCAB, np.float32), written([3] * n)) for n in (LONGEST_EXCESS + 3, 4000))
    assert short[3] == long[3] == -np.float32(1.75**LONGEST_EXCESS)
    huge = DryPenalty(1e6, 1000.0, 1, frozenset(), None)(np.zeros(VOCAB, np.float32), written([3] * 4000))
    assert np.isfinite(huge).all() and huge[3] < 0


def test_breakers_are_the_tokens_that_contain_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    tokenizer = Tokenizer(listed_files(tmp_path))
    tokens = breaker_tokens(DRY_BREAKERS, tokenizer)
    texts = [text.encode() for text in DRY_BREAKERS]
    every = {token for token in range(4096) if any(text in tokenizer.token_bytes(token) for text in texts)}
    assert tokens == every and len(tokens) > 2
    never = "\nexeunt omnes"
    assert breaker_tokens((never,), tokenizer) == {tokenizer.encode("a" + never, add_special_tokens=False)[-1]}
    assert breaker_tokens((), NoTokenizer()) == frozenset()


def test_bad_words_are_banned_with_and_without_a_space(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    tokenizer = Tokenizer(listed_files(tmp_path))
    banned_ids = bad_word_sequences(["lord", " thee and thou"], tokenizer, 4096)
    assert {tokenizer.decode(ids) for ids in banned_ids} == {"lord", " lord", "thee and thou", " thee and thou"}
    (long,) = (ids for ids in banned_ids if tokenizer.decode(ids) == " thee and thou")
    banned = BannedSequences(banned_ids)
    scores = banned(np.zeros(4096, np.float32), written(long[:-1]))
    assert scores[long[-1]] == -np.inf
    assert banned(np.zeros(4096, np.float32), written(long[1:-1]))[long[-1]] == 0
    prompt_only = Written(np.array(long[:-1]), len(long) - 1)
    assert banned(np.zeros(4096, np.float32), prompt_only)[long[-1]] == 0
    assert bad_word_sequences(["lord"], tokenizer, 1) == set()


@pytest.mark.parametrize("values", [{"bad_words": ["x"]}, {"dry_multiplier": 1.0}])
def test_texts_need_a_tokenizer(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="the engine has no tokenizer") as caught:
        logit_edits(SamplingParams(**values), NoTokenizer(), VOCAB)
    assert caught.value.fix


def test_only_rows_that_need_it_leave_the_device() -> None:
    def choice(**values: Any) -> object:
        params = SamplingParams(seed=1, **values)
        edits = logit_edits(params, Letters(), VOCAB)
        return Sampler(params, np.array([7]), VOCAB, NO_IDS, edits=edits).choice()

    assert choice(typical_p=0.5) is BEST, "greedy"
    assert choice(temperature=1.0) is not None
    for values in ({"typical_p": 0.5}, {"bad_words": ["a"]}, {"allowed_token_ids": [1]}, {"dry_multiplier": 1.0}):
        assert choice(temperature=1.0, **values) is None


PROMPTS = ["Once upon a time", "My lord, my lord, my lord", "KING", "The the the the", "O", "what thou wilt, what thou"]
ONE_SEQUENCE = 5 * 512


def no_even_twice(ids: list[int], logits: Row) -> Row:
    """Depends on the whole text."""
    return logits - np.float32(0.5) * np.bincount(np.array(ids) // 2 * 2, minlength=len(logits)).astype(np.float32)


EDITS: dict[str, dict[str, Any]] = {
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "bad words": {"bad_words": ["the", "lord", "what thou"]},
    "allowed": {"allowed_token_ids": tuple(range(100, 160))},
    "function": {"logits_processors": [no_even_twice]},
    "typical": {"typical_p": 0.3},
    "all": {
        "dry_multiplier": 1.0,
        "bad_words": ["thou"],
        "allowed_token_ids": tuple(range(100, 2000)),
        "logits_processors": [no_even_twice],
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
    },
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    return write_tiny_engine(folder / "speaking.llmc", model=mild_model(1, 4096), with_tokenizer=True)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with load(path) as opened:
        yield opened


def tokens_of(completion: Completion) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in completion.choices]


def test_neighbours_chunks_forks_and_preemption_change_nothing(engine: Engine, path: Path) -> None:
    asked = [
        (prompt, SamplingParams(max_tokens=10, temperature=1.0, seed=i, n=1 + i % 2, **values))
        for i, (prompt, values) in enumerate(zip(PROMPTS, EDITS.values(), strict=True))
    ]
    alone = [tokens_of(engine.generate(*question)[0]) for question in asked]
    prompts, params = zip(*asked, strict=True)
    together = [tokens_of(completion) for completion in engine.generate(prompts, params)]
    with load(path, kv_cache_bytes=ONE_SEQUENCE, max_step_tokens=5) as tight:
        preempted = [tokens_of(completion) for completion in tight.generate(prompts, params)]
        assert tight.loop.scheduler.preemptions > 0
    assert alone == together == preempted
    plain = [engine.generate(p, SamplingParams(max_tokens=10, temperature=1.0, seed=i)) for i, p in enumerate(PROMPTS)]
    changed = [a[0] != tokens_of(b[0])[0] for a, b in zip(alone, plain, strict=True)]
    # The same noise draws the same token wherever an option leaves it the likeliest sum.
    assert sum(changed) >= 3, "the options do something"


@pytest.mark.parametrize("name", [name for name, values in EDITS.items() if "typical_p" not in values])
def test_one_beam_is_the_greedy_choice(engine: Engine, name: str) -> None:
    values: dict[str, Any] = EDITS[name]
    for prompt in PROMPTS[:3]:
        (greedy,) = engine.generate(prompt, SamplingParams(max_tokens=10, **values))
        (beam,) = engine.generate(prompt, SamplingParams(max_tokens=10, beam_width=1, **values))
        assert beam.token_ids == greedy.token_ids
    (wide,) = engine.generate(prompt, SamplingParams(max_tokens=6, beam_width=3, n=3, **values))
    if "allowed_token_ids" in values:
        assert all(set(choice.token_ids) <= set(values["allowed_token_ids"]) for choice in wide.choices)


def test_beams_do_not_draw(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"typical_p cannot be 0\.5"):
        SamplingParams(beam_width=2, typical_p=0.5)


def test_answers_with_banned_words_are_kept(path: Path) -> None:
    with load(path, output_cache_bytes=1 << 20) as opened:
        banned = SamplingParams(max_tokens=3, bad_words=["the"])
        opened.generate("Once", banned)
        assert opened.generate("Once", banned)[0].cached_tokens == len(opened.tokenize("Once"))


def test_ids_that_the_model_lacks_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="token id 4096 is out of range") as caught:
        engine.generate("Once", SamplingParams(allowed_token_ids=[4096]))
    assert caught.value.at == "allowed_token_ids"
