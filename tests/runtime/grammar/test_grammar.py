"""Grammars over a real (reference) executor: outputs follow them, bad ones are refused, long ones delay nobody."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from llmc.errors import ModelFailureError, RequestError
from llmc.runtime.engine import Engine
from llmc.runtime.grammar.compiler import GrammarCompiler
from llmc.runtime.grammar.grammar import Grammar, GrammarKind, Preamble
from llmc.runtime.grammar.mask_time import MaskTime
from llmc.runtime.grammar.matcher import GrammarMask
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.tiny_engine import mild_model, write_tiny_engine

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "sort": {"enum": ["cat", "dog"]}},
    "required": ["age", "sort"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pytest.importorskip("llguidance")
    path = tmp_path_factory.mktemp("engine") / "speaking.llmc"
    with load(write_tiny_engine(path, model=mild_model(1, 4096), with_tokenizer=True, eos=(0,))) as opened:
        yield opened


def test_outputs_follow_their_grammar(speaking: Engine) -> None:
    cases = [
        (Grammar(GrammarKind.REGEX, "[0-9]{3}-[a-f]{2,4}"), r"[0-9]{3}-[a-f]{2,4}"),
        (Grammar(GrammarKind.CHOICE, json.dumps(["a pie", 'ün "quoted"'])), 'a pie|ün "quoted"'),
        (Grammar(GrammarKind.EBNF, 'start: "x" ("y" | "z")~2'), "x[yz]{2}"),
        (Grammar(GrammarKind.EBNF, 'root ::= "yes" | "no"'), "yes|no"),
        (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), r'\{"age": ?[0-9]{1,2}, ?"sort": ?"(cat|dog)"\}'),
    ]
    for seed in range(3):
        params = [SamplingParams(max_tokens=30, temperature=1.0, seed=seed, grammar=grammar) for grammar, _ in cases]
        completions = speaking.generate(["Once"] * len(cases), params)
        for completion, (_, pattern) in zip(completions, cases, strict=True):
            assert completion.finish_reason == "stop"
            assert re.fullmatch(pattern, completion.text), completion.text
    (several,) = speaking.generate("Once", replace(params[0], n=3))
    assert all(re.fullmatch(cases[0][1], choice.text) for choice in several.choices)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "(a"),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, '{"type": "objec"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://example.com/x"}'),
        (GrammarKind.JSON_SCHEMA, "[" * 5000 + "]" * 5000),
        (GrammarKind.CHOICE, "[]"),
        (GrammarKind.EBNF, "start: missing"),
        (GrammarKind.EBNF, "start: <[5000000]>"),
        (GrammarKind.EBNF, "root ::= ("),
        (GrammarKind.REGEX, "a" * (2 << 20)),
    ],
)
def test_bad_grammars_are_refused(speaking: Engine, kind: GrammarKind, source: str) -> None:
    with pytest.raises(RequestError) as caught:
        speaking.generate("Once", SamplingParams(grammar=Grammar(kind, source)))
    assert caught.value.at == "grammar" and caught.value.fix
    assert speaking.loop.scheduler.idle


def test_a_grammar_that_allows_nothing_is_said_to(speaking: Engine) -> None:
    for kind, source in ((GrammarKind.REGEX, r"[^\s\S]"), (GrammarKind.EBNF, "start: a\na: start")):
        with pytest.raises(RequestError, match="the grammar allows nothing at token 1"):
            speaking.generate("Once", SamplingParams(grammar=Grammar(kind, source)))


def test_a_grammar_whose_masks_take_too_long_ends_its_request(speaking: Engine) -> None:
    """A text of an ambiguous grammar is parsed in the more ways the longer it is; its choices share their time."""
    compiler = GrammarCompiler(speaking.tokenizer.path, 4096, (0,), seconds=600.0)
    source = "start: e\ne: e e e | e e | /[a-z ]/"
    matcher = compiler.compile(Grammar(GrammarKind.EBNF, source)).matcher
    compiler.close()
    time = MaskTime(0.05, 0.0)
    first, second = (GrammarMask(matcher, 4096, time=time) for _ in range(2))
    with pytest.raises(RequestError, match=r"needs more processor time than 0.05 s and 0 s per token at token \d+"):
        for _ in range(100):
            first.accept(int(first.allowed().nonzero()[0][-1]))
    with pytest.raises(RequestError, match="at token 1"):
        second.allowed()


def test_a_grammar_that_takes_too_long_is_killed(speaking: Engine) -> None:
    compiler = GrammarCompiler(speaking.tokenizer.path, 4096, (0,), seconds=0.001)
    grammar = Grammar(GrammarKind.CHOICE, json.dumps([f"{i} of many {i * i}" for i in range(4000)]))
    with pytest.raises(RequestError, match=r"did not finish within 0.001 seconds"):
        compiler.compile(grammar)
    compiler._seconds = 600.0
    assert compiler.compile(grammar)(1)[0].allowed().any(), "a new worker has taken its place"
    compiler.close()


def test_a_bomb_does_not_keep_other_grammars_waiting(speaking: Engine) -> None:
    compiler = GrammarCompiler(speaking.tokenizer.path, 4096, (0,), seconds=600.0)
    bomb = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 9999991}')
    with compiler.threads() as threads:
        never = threads.submit(compiler.compile, bomb)
        good = threads.submit(compiler.compile, Grammar(GrammarKind.CHOICE, '["yes", "no"]'))
        assert good.result()(1)[0].allowed().any()
        assert not never.done()
        compiler.close()
        with pytest.raises(RequestError, match="its process was ended"):
            never.result()
        with pytest.raises(RequestError, match="its process was ended"):
            compiler.compile(Grammar(GrammarKind.CHOICE, '["perhaps"]'))


def test_one_worker_and_no_more_is_started_before_the_first_grammar(speaking: Engine) -> None:
    compiler = GrammarCompiler(speaking.tokenizer.path, 4096, (0,), seconds=600.0)
    compiler.prepare()
    assert len(compiler._idle) == 1
    compiler.close()


def test_many_bombs_at_once_are_all_refused(speaking: Engine) -> None:
    compiler = GrammarCompiler(speaking.tokenizer.path, 4096, (0,), seconds=1.0)
    compiler.compile(Grammar(GrammarKind.CHOICE, '["first"]'), time.monotonic() + 600)
    compiler.prepare()
    bombs = [Grammar(GrammarKind.JSON_SCHEMA, f'{{"type": "integer", "multipleOf": {9999991 + i}}}') for i in range(6)]
    with compiler.threads() as threads:
        begin = time.monotonic()
        refused = [threads.submit(compiler.compile, bomb, begin) for bomb in [*bombs, *bombs]]
        for future in refused:
            with pytest.raises(RequestError, match="did not finish within 1 seconds"):
                future.result()
        good = threads.submit(compiler.compile, Grammar(GrammarKind.CHOICE, '["yes", "no"]'), begin + 600)
        assert good.result()(1)[0].allowed().any()
    with pytest.raises(RequestError, match="did not finish"):
        compiler.compile(bombs[0], time.monotonic() - 1.0)
    compiler.close()


def test_min_tokens_and_stop_tokens_that_leave_nothing(speaking: Engine) -> None:
    """A grammar that is at its end ends the output; one that is not cannot be followed, and that is not the model's."""
    (yes,) = speaking.tokenizer.encode("y", add_special_tokens=False)
    finished = Grammar(GrammarKind.REGEX, "[xy]{2}")
    (completion,) = speaking.generate("Once", SamplingParams(max_tokens=9, min_tokens=5, grammar=finished))
    assert re.fullmatch("[xy]{2}", completion.text) and completion.finish_reason == "stop"
    for source in ("y+", "x{2}y"):
        params = SamplingParams(
            max_tokens=9, min_tokens=5, stop_token_ids=(yes,), grammar=Grammar(GrammarKind.REGEX, source)
        )
        with pytest.raises(
            RequestError, match="grammar and min_tokens and stop_token_ids forbid all of them"
        ) as caught:
            speaking.generate("Once", params)
        assert not isinstance(caught.value, ModelFailureError) and "weights" not in str(caught.value)
    # Here the end may come as soon as nothing else may.
    optional = replace(params, grammar=Grammar(GrammarKind.REGEX, "x{2}(y|z)?"), logit_bias={})
    (completion,) = speaking.generate("Once", optional)
    assert re.fullmatch("xx|xxz", completion.text) and completion.finish_reason == "stop"


@pytest.mark.parametrize("opened", [True, False])
def test_a_grammar_holds_after_a_preamble(speaking: Engine, opened: bool) -> None:
    """Marked by texts, and by special tokens; whether the prompt has opened it or the output may."""
    special = next(i for i in range(speaking.info.vocab_size) if speaking.tokenizer.decode([i]) == "")
    for opening, closing in (("<think>", "</think>"), (special, special)):
        preamble = Preamble(None if opened else (opening,), (closing,))
        mask = speaking.grammars.compile(Grammar(GrammarKind.CHOICE, '["yes", "no"]', preamble))(1)[0]
        steps: tuple[str | int, ...] = ("I < see.", closing, "\n\n", "no")
        for step in steps if opened else (opening, *steps):
            ids = [step] if isinstance(step, int) else speaking.tokenizer.encode(step, add_special_tokens=False)
            for token in ids:
                assert mask.allowed()[token], step
                mask.accept(token)
        assert mask.is_complete or mask.allowed().sum() == len(speaking.info.eos_token_ids)


def test_a_preamble_that_is_not_opened_may_be_left_out(speaking: Engine) -> None:
    mask = speaking.grammars.compile(Grammar(GrammarKind.CHOICE, '["yes"]', Preamble(("<think>",), ("</think>",))))(1)[
        0
    ]
    starts = {speaking.tokenizer.decode([int(i)])[0] for i in mask.allowed().nonzero()[0]}
    assert starts == {"<", "y"}
