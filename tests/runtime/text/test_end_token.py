"""The token that ends an output is not in its text, also where tokenizer.json does not mark it as special."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.async_clients import listen, request, serving
from tests.runtime.tiny_engine import tiny_model, write_tiny_engine

PROMPT = [5, 9, 2]
# The last is the first token of its kind, and a plain word of the vocabulary.
WORDS = tiny_model(vocab=4096).greedy(PROMPT, 4)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    assert WORDS[-1] not in WORDS[:-1]
    with load(write_tiny_engine(tmp_path / "tiny.llmc", eos=(WORDS[-1],), with_tokenizer=True)) as opened:
        yield opened


@pytest.mark.parametrize("stop", [(), ("not in the text",)])
def test_completions_and_streams_leave_it_out(engine: Engine, stop: tuple[str, ...]) -> None:
    params = SamplingParams(max_tokens=8, stop=stop)
    text = engine.tokenizer.decode(WORDS[:-1])
    assert engine.tokenizer.decode(WORDS) != text
    (completion,) = engine.generate([PROMPT], params)
    assert (completion.text, completion.finish_reason) == (text, "stop")
    assert list(completion.token_ids) == WORDS, "token ids are all that came"
    assert "".join(piece.text for piece in engine.stream(PROMPT, params)) == text

    async def served() -> str:
        async with serving(engine) as clients:
            return (await listen(clients, request("end", tuple(PROMPT), params))).text()

    assert asyncio.run(served()) == text


def test_beams_leave_it_out(engine: Engine) -> None:
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=8, beam_width=2, n=2))
    ended = [choice for choice in completion.choices if choice.token_ids[-1] == WORDS[-1]]
    assert ended and all(c.text == engine.tokenizer.decode(c.token_ids[:-1]) for c in ended)


def test_it_stays_where_it_is_asked_for_or_ends_nothing(engine: Engine) -> None:
    whole = engine.tokenizer.decode(WORDS)
    kept = SamplingParams(max_tokens=8, skip_special_tokens=False)
    passed = SamplingParams(max_tokens=4, ignore_eos=True)
    assert [engine.generate([PROMPT], params)[0].text for params in (kept, passed)] == [whole, whole]
