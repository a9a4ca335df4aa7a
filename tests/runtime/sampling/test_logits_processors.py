"""Users' own functions over logits: what they are given, what they do wrong, whose request they end."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.errors import ModelFailureError, RequestError
from llmc.runtime.loading import load
from llmc.runtime.sampling.logit_edits import logit_edits
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.async_clients import Heard, listen, request, serving
from tests.runtime.sampling.letters import NO_IDS, VOCAB, NoTokenizer, Row, double_or_ban
from tests.runtime.tiny_engine import mild_model, write_tiny_engine

PROMPTS = ["Once upon a time", "KING", "O"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    return write_tiny_engine(folder / "speaking.llmc", model=mild_model(1, 4096), with_tokenizer=True)


def sampled(function: Any) -> int:
    params = SamplingParams(logits_processors=[function])
    edits = logit_edits(params, NoTokenizer(), VOCAB)
    return Sampler(params, np.array([7, 8]), VOCAB, NO_IDS, edits=edits).sample(np.zeros(VOCAB, np.float32))


def test_a_function_of_three_gets_prompt_and_output_apart() -> None:
    seen: list[Any] = []

    def two(ids: list[int], logits: Row) -> Row:
        seen.append(ids)
        return logits

    def three(prompt: list[int], output: list[int], logits: Row) -> Row:
        seen.append((prompt, output))
        logits[5] = 1.0
        return logits

    class Callable_:
        def __call__(self, ids: list[int], logits: Row) -> list[float]:
            return [*logits[:-1], 2.0]

    params = SamplingParams(logits_processors=(two, three))
    ours = Sampler(params, np.array([7, 8]), VOCAB, NO_IDS, edits=logit_edits(params, NoTokenizer(), VOCAB))
    logits = np.zeros(VOCAB, np.float32)
    assert [ours.sample(logits), ours.sample(logits)] == [5, 5]
    assert seen == [[7, 8], ([7, 8], []), [7, 8, 5], ([7, 8], [5])]
    assert not logits.any(), "the row is the executor's"
    assert sampled(Callable_()) == VOCAB - 1


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda ids, logits: None, "returned None"),
        (lambda ids, logits: logits[:3], "returned an array of shape [3]"),
        (lambda ids, logits: logits * np.nan, "returned nan for token id 0"),
        (lambda ids, logits: logits + np.inf, "returned inf for token id 0"),
        (lambda ids, logits: "high", "returned a str that is not an array"),
        (lambda ids, logits: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda ids, logits: logits - np.inf, "no token is allowed next: logits_processors forbids all of them"),
    ],
)
def test_what_a_function_does_wrong_is_named(function: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=re.escape(problem)) as caught:
        sampled(function)
    assert caught.value.fix and not isinstance(caught.value, ModelFailureError)
    assert caught.value.at in ("logits_processors[0]", "logits_processors")


def test_broken_logits_are_not_blamed_on_a_function() -> None:
    params = SamplingParams(logits_processors=(double_or_ban,))
    ours = Sampler(params, np.array([7]), VOCAB, NO_IDS, edits=logit_edits(params, NoTokenizer(), VOCAB))
    with pytest.raises(ModelFailureError, match="no usable logits"):
        ours.sample(np.full(VOCAB, np.nan, np.float32))


def third_token_fails(prompt: list[int], output: list[int], logits: Row) -> Row:
    if len(output) == 2:
        raise ValueError("enough")
    return logits


def nothing_third(prompt: list[int], output: list[int], logits: Row) -> Row:
    return logits - np.float32(np.inf) if len(output) == 2 else logits


@pytest.mark.parametrize("function", [third_token_fails, nothing_third])
@pytest.mark.parametrize("values", [{}, {"temperature": 1.0, "n": 3}, {"beam_width": 3}])
def test_a_function_that_fails_ends_its_own_request_only(path: Path, function: Any, values: dict[str, Any]) -> None:
    async def run() -> None:
        async with serving(load(path)) as running:
            good = [
                request(i, tuple(running.engine.tokenize(p)), SamplingParams(max_tokens=9))
                for i, p in enumerate(PROMPTS)
            ]
            params = SamplingParams(max_tokens=9, logits_processors=[function], **values)
            bad = request("bad", good[0].prompt_token_ids, params)
            *heard, failed = await asyncio.gather(
                *(listen(running, question) for question in [*good, bad]), return_exceptions=True
            )
            assert isinstance(failed, RequestError) and "logits_processors" in str(failed)
            assert all(isinstance(answer, Heard) and answer.reason() == "length" for answer in heard)
            assert running.stats().running == running.stats().blocks_used == 0

    asyncio.run(run())


def test_answers_that_a_function_chose_are_not_kept(path: Path) -> None:
    calls: list[int] = []

    def counting(ids: list[int], logits: Row) -> Row:
        calls.append(len(ids))
        return logits

    with load(path, output_cache_bytes=1 << 20) as opened:
        params = SamplingParams(max_tokens=3, logits_processors=[counting])
        assert opened.generate("Once", params)[0].token_ids == opened.generate("Once", params)[0].token_ids
        assert len(calls) == 6
