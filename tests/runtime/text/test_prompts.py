"""The forms in which prompts, conversations, parameters and grammars are taken, and those that are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc.engines.llm import LLM
from llmc.errors import LlmcError, OptionError, RequestError
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine import Engine
from llmc.runtime.grammar.grammar import Grammar, GrammarKind
from llmc.runtime.loading import load
from llmc.runtime.requests.completion import Choice
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.tiny_engine import tiny_model, write_tiny_engine

MODEL = tiny_model(vocab=4096)
TALK = [{"role": "user", "content": "Who art thou?"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "speaking.llmc"
    return write_tiny_engine(path, model=MODEL, with_tokenizer=True)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with load(path) as opened:
        yield opened


def test_every_form_of_a_prompt_is_that_prompt(engine: Engine) -> None:
    texts = ["A king", "B", "C"]
    ids = [engine.tokenize(text) for text in texts]
    wanted = engine.generate(texts, max_tokens=3)
    assert [list(c.token_ids) for c in wanted] == [MODEL.greedy(prompt_ids, 3) for prompt_ids in ids]
    many: list[Any] = [
        tuple(texts),
        (text for text in texts),
        map(str.strip, texts),
        dict.fromkeys(texts).keys(),
        ids,
        (tuple(prompt_ids) for prompt_ids in ids),
        [np.array(prompt_ids) for prompt_ids in ids],
        [torch.tensor(prompt_ids) for prompt_ids in ids],
        [{"prompt": text} for text in texts],
        [{"prompt_token_ids": prompt_ids} for prompt_ids in ids],
        ({"prompt": "is not read", "prompt_token_ids": np.array(prompt_ids)} for prompt_ids in ids),
        ["A king", ids[1], {"prompt": "C"}],
    ]
    for prompts in many:
        assert engine.generate(prompts, max_tokens=3) == wanted
    forms: list[Any] = ["A king", ids[0], tuple(ids[0]), iter(ids[0]), np.array(ids[0]), torch.tensor(ids[0])]
    for prompt in [*forms, {"prompt": "A king"}, {"prompt_token_ids": ids[0]}, ["A king"]]:
        assert engine.generate(prompt, max_tokens=3) == wanted[:1]
    singles: Any = torch.tensor([[5], [6], [7]])
    assert engine.generate(singles, max_tokens=3) == engine.generate([[5], [6], [7]], max_tokens=3)
    streamed = engine.stream({"prompt": "A king"}, max_tokens=3)
    assert sum((piece.token_ids for piece in streamed), ()) == wanted[0].token_ids
    np.testing.assert_array_equal(engine.logits(iter(ids[0])), engine.logits(ids[0]))  # type: ignore[call-overload]


def test_no_prompts_are_no_completions(engine: Engine) -> None:
    nothing: list[Any] = [[], (), iter(()), np.array([])]
    for prompts in nothing:
        assert engine.generate(prompts) == [] == engine.generate(prompts, max_tokens=3, progress=True)
    assert engine.generate([], []) == [] == engine.chat([])


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        ({"prompts": "A"}, "a prompt has no 'prompts'"),
        ([{"prompt": "A", "multi_modal_data": {}}], "a prompt has no 'multi_modal_data'"),
        ({}, "a prompt has neither text nor ids"),
        ({"prompt": None}, "a prompt has neither text nor ids"),
        ({"prompt": [1, 2]}, r"prompt cannot be \[1, 2\]"),
        ({"prompt_token_ids": "A"}, "prompt_token_ids cannot be 'A'"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        (TALK, "a prompt has no 'role'"),
        ([[["A"]]], r"a token id must be a whole number, not \['A'\]"),
        ([["A"]], "a token id must be a whole number, not 'A'"),
        ("\ud800", "the text cannot be written as UTF-8"),
        ([1, "A"], r"a prompt cannot be 1 \(int\)"),
        (None, r"a prompt cannot be None"),
    ],
)
def test_what_is_no_prompt_is_refused(engine: Engine, prompts: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        engine.generate(prompts)
    assert caught.value.fix
    if prompts is TALK:
        assert "chat(messages)" in caught.value.fix


def test_a_conversation_is_rendered_and_answered(engine: Engine) -> None:
    (answer,) = engine.chat(TALK, max_tokens=3, chat_template="plain")
    assert [answer] == engine.generate("User: Who art thou?\nAssistant:", max_tokens=3)
    assert engine.chat([TALK, TALK], max_tokens=3, chat_template="plain") == [answer, answer]
    assert engine.chat((talk for talk in (TALK, TALK)), max_tokens=3, chat_template="plain") == [answer, answer]
    assert [answer] == engine.chat(
        TALK,
        max_tokens=3,
        chat_template="{{ greeting }}{{ messages[0].content }}\nAssistant:",
        chat_template_kwargs={"greeting": "User: "},
    )
    going_on = [*TALK, {"role": "assistant", "content": "I am"}]
    assert engine.chat(going_on, max_tokens=3, chat_template="plain", continue_final_message=True) == engine.generate(
        "User: Who art thou?\nAssistant: I am", max_tokens=3
    )
    pieces = list(engine.stream_chat(TALK, max_tokens=3, chat_template="plain"))
    assert "".join(piece.text for piece in pieces) == answer.text


@pytest.mark.parametrize(
    ("messages", "more", "problem"),
    [
        ("Hello", {}, "a conversation is a list of messages"),
        ([["Hello"]], {}, "a conversation is a list of messages"),
        (TALK[0], {}, "a conversation is a list of messages"),
        ([{"content": "no role"}], {}, "a conversation is a list of messages"),
        (5, {}, "a conversation is a list of messages"),
        ([*TALK, {"role": "user"}], {}, r"message 1 \('user'\) has no content"),
        ([{"role": "system", "content": None}], {}, "has no content"),
        ([{"role": "user", "content": b"x"}], {}, "messages cannot be written as JSON"),
        (TALK, {"chat_template_kwargs": {"x": object()}}, "chat_template_kwargs cannot be written as JSON"),
        (TALK, {"chat_template": None}, "without a chat template"),
        (TALK, {"chat_template": 5}, "chat_template cannot be 5"),
        (TALK, {"chat_template_kwargs": 5}, r"chat_template_kwargs cannot be 5 \(int\)"),
        (TALK, {"tools": "x"}, r"tools cannot be 'x' \(str\)"),
        (TALK, {"progress": None}, "progress cannot be None"),
        (TALK, {"chat_template": "plane"}, "the chat template cannot be read"),
        (TALK, {"chat_template": "{{ raise_exception('no') }}"}, "the chat template fails: no"),
    ],
)
def test_what_is_no_conversation_is_refused(engine: Engine, messages: Any, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(LlmcError, match=problem) as caught:
        engine.chat(messages, **{"chat_template": "plain", **more})
    assert caught.value.fix


def test_the_asyncio_engine_takes_texts_ids_and_messages(tmp_path: Path, engine: Engine) -> None:
    template = "{% for m in messages %}User: {{ m.content }}\nAssistant:{% endfor %}"
    chatty = write_tiny_engine(tmp_path / "e.llmc", model=MODEL, with_tokenizer=True, chat_template=template)
    ids = engine.tokenize("A king")
    (wanted,) = engine.generate("A king", max_tokens=3)
    answer = engine.generate("User: Who art thou?\nAssistant:", max_tokens=3)[0].token_ids

    async def run() -> None:
        async with AsyncEngine(load(chatty)) as serving:

            async def tokens(prompt: Any, **more: Any) -> tuple[int, ...]:
                outputs = [output async for output in serving.generate(prompt, **more)]
                assert outputs[-1].finished
                return sum((c.token_ids for output in outputs for c in output.choices), ())

            same: list[Any] = ["A king", ids, {"prompt": "A king"}, {"prompt_token_ids": ids}]
            assert (
                await asyncio.gather(*(tokens(prompt_form, max_tokens=3) for prompt_form in same))
                == [wanted.token_ids] * 4
            )
            params = SamplingParams(max_tokens=3)
            assert await tokens("A king", params=params, streams=False) == wanted.token_ids
            whole = GenerationRequest(prompt_token_ids=tuple(ids), params=params, request_id="mine")
            assert await tokens(whole) == wanted.token_ids
            assert await tokens(TALK, max_tokens=3) == answer
            assert repr(serving) == f"<AsyncEngine of {serving.engine!r}: 0 running, 0 waiting>"
            wrong: list[tuple[Any, dict[str, Any], str]] = [
                (whole, {"max_tokens": 3}, "with a GenerationRequest"),
                ("A", {"params": params, "max_tokens": 3}, "max_tokens=3 was given with a SamplingParams"),
                (["A", "B"], {}, "a token id must be a whole number"),
                ("A", {"max_token": 3}, "unknown sampling parameter"),
            ]
            for prompt, more, problem in wrong:
                with pytest.raises(RequestError, match=problem):
                    await tokens(prompt, **more)
        with pytest.raises(RequestError, match="the engine is closed"):
            serving.engine.generate("A")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (("json", '{"type": "object"}'), (GrammarKind.JSON_SCHEMA, '{"type": "object"}')),
        (("json", {"type": "object"}), (GrammarKind.JSON_SCHEMA, '{"type": "object"}')),
        (("json",), (GrammarKind.JSON_OBJECT, "")),
        (("json_schema", {}), (GrammarKind.JSON_SCHEMA, "{}")),
        (("json_object",), (GrammarKind.JSON_OBJECT, "")),
        (("regex", "a+"), (GrammarKind.REGEX, "a+")),
        ((GrammarKind.CHOICE, ["a", "b"]), (GrammarKind.CHOICE, json.dumps(["a", "b"]))),
        (("ebnf", "root ::= x"), (GrammarKind.EBNF, "root ::= x")),
        (("grammar", "root ::= x"), (GrammarKind.EBNF, "root ::= x")),
    ],
)
def test_a_grammars_kind_may_be_a_word(given: tuple[Any, ...], meant: tuple[GrammarKind, str]) -> None:
    assert Grammar(*given) == Grammar(*meant)
    assert (Grammar(*given).kind, Grammar(*given).source) == meant
    assert llmc.GrammarKind is GrammarKind


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("jsn", "{}"), "a grammar's kind cannot be 'jsn'"),
        ((None,), r"a grammar's kind cannot be None \(NoneType\)"),
        (("regex", 3), "the source of a regex grammar cannot be 3"),
        (("regex", ["a"]), "the source of a regex grammar cannot be"),
        (("choice", "yes"), "the source of a choice grammar cannot be 'yes'"),
        (("choice", {"a": 1}), "the source of a choice grammar cannot be"),
        (("json", {"a": object()}), "the source of a json_schema grammar cannot be"),
    ],
)
def test_a_wrong_grammar_is_refused(given: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        Grammar(*given)
    assert caught.value.fix
    assert given[0] != "jsn" or "did you mean 'json'" in caught.value.fix


def test_what_users_see_says_in_one_line_what_it_is(engine: Engine) -> None:
    params = SamplingParams(max_tokens=3, stop="x")
    (completion,) = engine.generate("A king", params)
    text = repr(completion.text)
    shown: list[tuple[object, str]] = [
        (engine, "<Engine tiny (float32) for reference: sequences of 40 tokens, 4 at a time>"),
        (LLM(engine), f"<LLM on {engine!r}>"),
        (params, "SamplingParams(max_tokens=3, stop=('x',))"),
        (SamplingParams(), "SamplingParams()"),
        (completion.choices[0], f"Choice(text={text}, 3 tokens, finish_reason='length')"),
        (completion, f"Completion(text={text}, 3 tokens, finish_reason='length', choices=1, prompt_tokens=2)"),
        (engine.tokenizer, f"<Tokenizer {engine.path / 'tokenizer' / 'tokenizer.json'}>"),
        (
            GenerationRequest(prompt_token_ids=(1, 2), params=params, request_id="a"),
            f"GenerationRequest('a', prompt of 2 tokens, {params!r})",
        ),
    ]
    assert [repr(value) for value, _ in shown] == [text for _, text in shown]
    assert repr(engine.manifest) == "<Manifest of tiny for reference: 4 files>"
    long = Choice("x" * 1000, tuple(range(1000)), "stop")
    assert len(repr(long)) < 120 and "\n" not in repr(Choice("a\nb", (1,), "stop"))


def test_a_loaded_engine_is_used_as_it_was_loaded(engine: Engine) -> None:
    assert LLM(engine).generate("A king", max_tokens=3) == engine.generate("A king", max_tokens=3)
    changes: list[dict[str, Any]] = [
        {"threads": 1},
        {"kv_memory": 0.5},
        {"prefix_cache": False},
        {"output_cache_bytes": 5},
        {"speculation": {}},
    ]
    for given in changes:
        with pytest.raises(OptionError, match="was given with an engine that is already loaded"):
            LLM(engine, **given)
