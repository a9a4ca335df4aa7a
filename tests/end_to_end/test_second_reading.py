"""kvzip: how prompts are read again, who finds the table that is left, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from llmc.errors import OptionError, RequestError
from llmc.program import KVzip
from llmc.runtime.engine import Engine
from llmc.runtime.requests import job_builder, second_reading
from llmc.runtime.text.tokenizer import Tokenizer
from tests.end_to_end.kvzip_reference import greedy
from tests.end_to_end.test_kv_compression import built, model
from tests.end_to_end.test_scored_compression import KVZIP, POLICIES, SNAPKV
from tests.end_to_end.test_states import built as built_tiny
from tests.tiny_models import tiny_tokens

__all__ = ["built", "model"]

TOKENS = tiny_tokens(400)
POLICY = KVzip(budget=48, every=16, sinks=2, block=8, chunk=40)


def said(engine: Engine, prompt: list[int], **options: Any) -> tuple[tuple[int, ...], int, int]:
    """The tokens after a prompt, how many of its own were found, and how many rows have left."""
    cache, group = engine.loop.scheduler.prefix_cache, engine.loop.groups[0]
    hits, dropped = cache.hits, group.stats.dropped
    (answer,) = engine.generate([prompt], max_tokens=20, ignore_eos=True, **options)
    return answer.choices[0].token_ids, cache.hits - hits, group.stats.dropped - dropped


def test_the_second_request_begins_after_the_table(built: Callable[..., Path]) -> None:
    """96 of 100 tokens: 88 are before the cut. Nothing is read again, so no row leaves again."""
    with llmc.load(built(kv_compression=KVZIP, target="cpu"), threads=1) as engine:
        tokens, found, left = said(engine, TOKENS[:100])
        assert (found, left) == (0, 40)
        assert said(engine, TOKENS[:100]) == (tokens, 96, 0)
        other = KVZIP.replace("48", "40")
        assert said(engine, TOKENS[:100], kv_compression=other)[1:] == (80, 48), "the plain prefix, read again"
        assert said(engine, TOKENS[:100], kv_compression="none")[1:] == (88, 0)


def test_scores_start_at_zero(built: Callable[..., Path]) -> None:
    """The caches hold the scores of other requests, also of those under way."""
    with llmc.load(built(kv_compression=KVZIP, target="cpu"), threads=1, prefix_cache=False) as engine:
        alone = said(engine, TOKENS[:100])[0]
        assert list(alone) == greedy(POLICY, TOKENS[:100], 20).tokens
        for count in (1, 3):
            answers = engine.generate([TOKENS[:100], *[TOKENS[100:200]] * count], max_tokens=20, ignore_eos=True)
            assert answers[0].choices[0].token_ids == alone


def test_questions_about_one_document_share_its_table(built: Callable[..., Path]) -> None:
    """With `prefix` a longer prompt, such as the next turn of a conversation, is cut at the same token."""
    text, prompts = f"{KVZIP},prefix=80", [[*TOKENS[:80], *TOKENS[at : at + 30]] for at in (100, 150, 200)]
    path, expected = built(kv_compression=KVZIP, target="cpu"), []
    with llmc.load(path, threads=1, prefix_cache=False) as engine:
        for prompt in prompts:
            tokens, _, left = said(engine, prompt, kv_compression=text)
            assert left == 24
            expected.append(tokens)
    with llmc.load(path, threads=1) as engine:
        found = [said(engine, prompt, kv_compression=text) for prompt in prompts]
        assert [tokens for tokens, _, _ in found] == expected
        assert [(hits, left) for _, hits, left in found] == [(0, 24), (80, 0), (80, 0)]
        turn = [*prompts[0], *expected[0], *TOKENS[300:310]]
        assert said(engine, turn, kv_compression=text)[1:] == (128, 0)


def test_parts_begin_with_the_instruction(built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    instruction = TOKENS[390:396]
    monkeypatch.setattr(job_builder, "instruction_of", lambda policy, tokenizer: tuple(instruction))
    with llmc.load(built(kv_compression=KVZIP, target="cpu"), threads=1) as engine:
        tokens = said(engine, TOKENS[:120])[0]
    assert list(tokens) == greedy(POLICY, TOKENS[:120], 20, instruction).tokens


def test_the_tokenizer_says_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spelled(Tokenizer):
        exists = True

        def __init__(self) -> None:
            pass

        def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return [ord(letter) for letter in text]

    ids = second_reading.instruction_of(POLICY, Spelled())
    assert "".join(map(chr, ids)) == second_reading.INSTRUCTION
    assert second_reading.instruction_of(POLICIES[SNAPKV], Spelled()) == ()


def test_parts_fit_into_steps(model: Path, tmp_path: Path) -> None:
    """A step of 32 tokens has room for a cue of 8 and 24 tokens of the prompt."""
    limits: dict[str, Any] = {"max_batch_tokens": 32, "max_sequences": 2, "max_model_len": 200}
    llmc.build(model, tmp_path / "e.llmc", dtype="float32", block_size=8, kv_compression=KVZIP, target="cpu", **limits)
    with llmc.load(tmp_path / "e.llmc", threads=1) as engine:
        assert list(said(engine, TOKENS[:100])[0]) == greedy(replace(POLICY, chunk=24), TOKENS[:100], 20).tokens


def test_prompts_without_room_to_read_them_again_are_refused(
    built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """240 of 255 tokens would be read again, and 16 positions follow."""
    monkeypatch.setattr(job_builder, "instruction_of", lambda policy, tokenizer: tuple(range(6)))
    with llmc.load(built(kv_compression=KVZIP, target="cpu"), threads=1) as engine:
        calls: list[Callable[[], object]] = [
            lambda: engine.generate([TOKENS[:255]], max_tokens=1),
            lambda: engine.logits([TOKENS[:255]]),
        ]
        for call in calls:
            with pytest.raises(RequestError) as caught:
                call()
            problem = "prompt 0 has 255 tokens, and kvzip:budget=48,every=16,sinks=2,chunk=40 reads the first 240"
            assert caught.value.problem.startswith(problem) and caught.value.problem.endswith("there is room for 16")
            assert caught.value.fix is not None and "max_model_len=262 and max_batch_tokens=22" in caught.value.fix
        engine.generate([TOKENS[:255]], max_tokens=1, kv_compression="none")
        engine.generate([TOKENS[:240]], max_tokens=1)


def test_models_with_states_are_refused(tmp_path: Path) -> None:
    options = {"block_size": 8, "kv_compression": KVZIP}
    with pytest.raises(OptionError, match="a model with states, which a second reading of the prompt would change"):
        built_tiny(tiny_architecture("jamba"), tmp_path / "engine.llmc", **options)
