"""Speculation never changes an answer: tokens, texts, log-probabilities and reasons are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from llmc import Engine, SamplingParams, load
from llmc.runtime.grammar.grammar import Grammar, GrammarKind
from llmc.runtime.loop import opening
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.speculation.speculation import Speculation
from tests.quick_sample import quick_sample
from tests.runtime.speculation.guesses import Guesses, Open, Trees
from tests.runtime.speculation.matrix import PROMPTS, asked, told


@cache
def plain(path: Path) -> tuple[list[object], dict[tuple[int, ...], set[tuple[int, ...]]]]:
    """The answers without drafts, and by prompt all tokens that follow it."""
    known: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    with load(path) as engine:
        answers = []
        for prompt, params in zip(*asked(PROMPTS[:2]), strict=True):
            (answer,) = engine.generate(prompt, params)
            answers.append(told(answer))
            ids = tuple(engine.tokenize(prompt))
            known.setdefault(ids, set()).update(choice.token_ids for choice in answer.choices)
    return answers, known


def truth(known: dict[tuple[int, ...], set[tuple[int, ...]]], tokens: Sequence[int]) -> int:
    """What came next in one of the answers that begin so."""
    for prompt, answers in known.items():
        if tuple(tokens[: len(prompt)]) == prompt:
            said = tuple(tokens[len(prompt) :])
            for answer in answers:
                if answer[: len(said)] == said and len(answer) > len(said):
                    return answer[len(said)]
    return 5


@pytest.fixture
def speculating(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads engines whose requests get these drafts."""

    def opened(path: Path, speculation: Speculation, **options: Any) -> Engine:
        def loop(*arguments: Any, **named: Any) -> StepLoop:
            return StepLoop(*arguments, **{**named, "speculation": speculation})

        monkeypatch.setattr(opening, "StepLoop", loop)
        return load(path, **options)

    return opened


@pytest.mark.parametrize(
    ("drafter", "most", "right"),
    quick_sample(
        [(Guesses, 5, 0.0), (Guesses, 5, 0.7), (Guesses, 5, 1.0), (Trees, 12, 0.7)],
        [(Trees, 12, 0.7)],
    ),
)
def test_answers_are_those_without_drafts(
    draft_engine: Path, speculating: Any, drafter: type[Guesses], most: int, right: float
) -> None:
    answers, known = plain(draft_engine)
    speculation = Speculation(lambda: drafter(partial(truth, known), 4096, right), most, Open)
    with speculating(draft_engine, speculation) as engine:
        alone = [told(engine.generate(*question)[0]) for question in zip(*asked(PROMPTS[:2]), strict=True)]
        assert alone == answers
        counts = speculation.stats
        if right:
            assert counts.accepted_tokens > 0.4 * right * counts.drafts > 50
        prompts, params = asked(PROMPTS[:2])
        assert [told(completion) for completion in engine.generate(prompts, params)] == answers, "among neighbours"
    tight = Speculation(lambda: drafter(partial(truth, known), 4096, right), 3, Open)
    with speculating(draft_engine, tight, kv_cache_bytes=600_000, max_step_tokens=40, max_sequences=12) as engine:
        assert [told(completion) for completion in engine.generate(prompts, params)] == answers, "with little room"
        assert engine.loop.pool.used == 0


def test_steps_are_fewer(draft_engine: Path, speculating: Any) -> None:
    """Drafts that are right make six tokens of one step."""
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    with load(draft_engine) as engine:
        known = {tuple(engine.tokenize(PROMPTS[0])): {engine.generate(PROMPTS[0], greedy)[0].choices[0].token_ids}}
    speculation = Speculation(lambda: Guesses(partial(truth, known), 4096, 1.0, least=5), 5, Open)
    with speculating(draft_engine, speculation) as engine:
        engine.generate(PROMPTS[0], greedy)
    counts = speculation.stats
    assert counts.accepted_tokens == counts.draft_tokens >= 15
    assert counts.accepted_at[0] == counts.drafts


@pytest.mark.parametrize("drafter", quick_sample([Guesses, Trees], [Trees]))
def test_drafts_that_a_grammar_forbids_are_cut(draft_engine: Path, speculating: Any, drafter: type[Guesses]) -> None:
    """Of five random tokens a step hardly any may follow; what may is read as ever."""
    params = SamplingParams(max_tokens=40, temperature=0.0, grammar=Grammar(GrammarKind.REGEX, "[a-c]{60}"))
    with load(draft_engine) as engine:
        expected = engine.generate(PROMPTS[0], params)[0].choices[0].token_ids
    speculation = Speculation(lambda: drafter(lambda tokens: 5, 4096, 0.0, least=5), 5, Open)
    with speculating(draft_engine, speculation) as engine:
        assert engine.generate(PROMPTS[0], params)[0].choices[0].token_ids == expected
        assert speculation.stats.draft_tokens < len(expected)
        ids = tuple(engine.tokenize(PROMPTS[0]))
    right = Speculation(lambda: drafter(partial(truth, {ids: {expected}}), 4096, 1.0, least=5), 5, Open)
    with speculating(draft_engine, right) as engine:
        assert engine.generate(PROMPTS[0], params)[0].choices[0].token_ids == expected
    assert right.stats.accepted_tokens > 0.5 * len(expected)
