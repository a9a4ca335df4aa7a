"""What went wrong in other engines, each by itself. The engine drafts for itself: every draft is right, so that runs of
accepted ones are as long as they can be, and whatever has to end them comes within one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc import Engine, SamplingParams, load
from llmc.program import Limits
from llmc.runtime.grammar.grammar import Grammar, GrammarKind
from llmc.runtime.speculation.speculation import Speculation
from tests.runtime.model_free import PROMPT, Counted, Run, next_token
from tests.runtime.speculation.guesses import Guesses, Open
from tests.runtime.speculation.matrix import told

TEXT = "KING RICHARD:\nMy lord"
DRAFTS = 5


@pytest.fixture(scope="module")
def plain(draft_engine: Path) -> Iterator[Engine]:
    with load(draft_engine) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting(draft_engine: Path) -> Iterator[Engine]:
    given = {"method": "draft_model", "model": str(draft_engine), "num_speculative_tokens": DRAFTS}
    with load(draft_engine, speculation=given) as engine:
        speculation = engine.loop.speculation
        assert speculation is not None
        speculation._gate = Open(DRAFTS)
        yield engine


def both(plain: Engine, drafting: Engine, **options: Any) -> Any:
    """What both say, which is the same; drafts were accepted."""
    speculation = drafting.loop.speculation
    assert speculation is not None
    before = speculation.stats
    completion = drafting.generate(TEXT, **options)[0]
    assert told(completion) == told(plain.generate(TEXT, **options)[0])
    after = speculation.stats
    assert after.accepted_tokens > before.accepted_tokens
    return completion


def greedy(plain: Engine, count: int) -> list[int]:
    return list(plain.generate(TEXT, max_tokens=count)[0].token_ids)


def test_a_stop_token_in_an_accepted_run_counts_before_the_length(plain: Engine, drafting: Engine) -> None:
    """sglang#31599, transformers#47912: both come in one step, and the first of them is why it ends."""
    tokens = greedy(plain, 12)
    last = next(index for index in range(4, 12) if tokens[index] not in tokens[:index])
    completion = both(plain, drafting, max_tokens=last + 1, stop_token_ids=(tokens[last],))
    assert (completion.finish_reason, completion.choices[0].stop_reason) == ("stop", tokens[last])
    assert list(completion.token_ids) == tokens[: last + 1]


def test_a_stop_string_in_an_accepted_run_counts_before_the_length(plain: Engine, drafting: Engine) -> None:
    text = plain.generate(TEXT, max_tokens=12)[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    completion = both(plain, drafting, max_tokens=12, stop=[stop])
    assert completion.finish_reason == "stop" and completion.text == text[: text.index(stop)]


def test_the_length_ends_a_run_of_drafts(plain: Engine, drafting: Engine) -> None:
    for count in range(3, 12):
        assert both(plain, drafting, max_tokens=count, ignore_eos=True).finish_reason == "length"


def test_each_row_has_the_grammars_state_of_its_own(plain: Engine, drafting: Engine) -> None:
    """vllm#27969, #46118, #54442."""
    grammar = Grammar(GrammarKind.REGEX, "(ab|cd|ef){6,20}")
    for seed in range(4):
        completion = both(plain, drafting, max_tokens=20, temperature=1.0, seed=seed, grammar=grammar)
        assert set(completion.text) <= set("abcdef")


def test_nothing_follows_a_grammar_that_is_complete(plain: Engine, drafting: Engine) -> None:
    """vllm#42619: what was drafted after the end of text is not taken in."""
    grammar = Grammar(GrammarKind.REGEX, "My lord, what is the matter")
    completion = both(plain, drafting, max_tokens=40, grammar=grammar)
    assert completion.text == "My lord, what is the matter" and completion.finish_reason == "stop"


def test_log_probabilities_are_of_the_row_that_the_token_came_from(plain: Engine, drafting: Engine) -> None:
    """vllm#34497. Of the whole text at once they are the same, up to rounding."""
    completion = both(plain, drafting, max_tokens=16, logprobs=2, temperature=0.9, seed=3)
    prompt = plain.tokenize(TEXT)
    rows = plain.logits([*prompt, *completion.token_ids])[len(prompt) - 1 : -1].astype("float64")
    for row, token, logprob in zip(rows, completion.token_ids, completion.choices[0].logprobs, strict=True):
        expected = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        assert logprob.logprob == pytest.approx(expected, abs=1e-4)


def test_min_p_and_bias_are_not_forgotten(plain: Engine, drafting: Engine) -> None:
    """vllm#42744."""
    both(plain, drafting, max_tokens=30, temperature=1.2, seed=1, min_p=0.2)
    token = greedy(plain, 3)[2]
    completion = both(plain, drafting, max_tokens=30, logit_bias={token: -100.0})
    assert token not in completion.token_ids


def test_penalties_count_the_tokens_of_the_run(plain: Engine, drafting: Engine) -> None:
    both(plain, drafting, max_tokens=30, frequency_penalty=1.5)
    completion = both(plain, drafting, max_tokens=10, presence_penalty=100.0, ignore_eos=True)
    assert len(set(completion.token_ids)) == 10, "none came twice"


def test_seeds_are_of_each_request(plain: Engine, drafting: Engine) -> None:
    """vllm#6038, TensorRT-LLM#19487: also where requests with and without seeds share steps."""
    answers = [both(plain, drafting, max_tokens=20, temperature=1.0, seed=seed) for seed in range(3)]
    options: list[dict[str, Any]] = [
        {"max_tokens": 20, "temperature": 1.0, "seed": seed} for seed in (0, None, 1, None, 2)
    ]
    together = drafting.generate([TEXT] * 5, [SamplingParams(**option) for option in options])
    assert [told(together[index]) for index in (0, 2, 4)] == [told(answer) for answer in answers]


def test_choices_part_and_each_has_its_own_drafts(plain: Engine, drafting: Engine) -> None:
    completion = both(plain, drafting, max_tokens=20, temperature=1.0, seed=5, n=4)
    assert len({choice.token_ids for choice in completion.choices}) > 1


def test_beams_are_those_without_drafts(plain: Engine, drafting: Engine) -> None:
    """They draft nothing, beside one who does."""
    params = [SamplingParams(max_tokens=12, beam_width=3, n=2), SamplingParams(max_tokens=20, temperature=0.0)]
    completions, expected = (engine.generate([TEXT, TEXT], params) for engine in (drafting, plain))
    assert list(map(told, completions)) == list(map(told, expected)) and len(completions[0].choices) == 2


def test_prefix_hits_are_not_lost(plain: Engine, drafting: Engine) -> None:
    """vllm#51769: blocks of a prompt are found though the draft model has read them, too, or has not."""
    text = "A prompt that nobody has given before, long enough to fill some blocks of the cache. " * 3
    for engine in (plain, drafting):
        cache = engine.loop.scheduler.prefix_cache
        engine.generate(text, max_tokens=1)
        before = cache.hits
        engine.generate(text + "And", max_tokens=4)
        hits = cache.hits - before
        assert hits == len(engine.tokenize(text)) // 16 * 16 == 64


def drafted(blocks: int, drafts: int = 5, right: float = 1.0) -> Run:
    """Requests of the pretended model, whose next token follows from all before it."""
    limits = Limits(32, 4, 16, max_model_len=64, block_size=4)
    return Run(limits, blocks, speculation=Speculation(lambda: Guesses(next_token, 97, right, least=5), drafts, Open))


def test_blocks_are_there_for_all_drafts_and_the_token_before_them() -> None:
    """vllm#16370: at every place within a block. What Run checks in each step is that slots are the request's own."""
    for length in range(1, 9):
        run = drafted(20)
        request = Counted(PROMPT[:length], 20)
        run.add(request)
        while not request.finished:
            for chunk in run.step():
                end = chunk.start + chunk.tokens
                assert request.finished or len(request.standing.blocks) * 4 >= min(end, len(request.tokens))
        assert request.tokens == request.expected()


def test_a_preemption_drops_drafts() -> None:
    """vllm#28473: also one that takes back a step which was planned with drafts."""
    run = drafted(20)
    requests = [Counted(PROMPT[i : i + 6], 24, salt=b"") for i in range(3)]
    for request in requests:
        run.add(request)
    for _ in range(3):
        run.step()
    plan = run.scheduler.schedule()
    assert any(chunk.draft for chunk in plan.chunks)
    run.scheduler.preempt_all()
    assert run.pool.used == 0
    run.finish()
    assert all(request.tokens == request.expected() for request in requests)


def test_no_draft_is_ever_found_in_the_prefix_cache() -> None:
    """Blocks that hold drafts which did not come true are not those of the text that came."""
    run = drafted(40, right=0.5)
    for _ in range(3):
        request = Counted(PROMPT[:9], 30, salt=b"")
        run.add(request)
        run.finish()
        assert request.tokens == request.expected()
