"""Fields of vLLM's and OpenAI's APIs: honoured, ignored with a warning, or refused with the reason."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.schemas.field_notes import IGNORED, REFUSED
from llmc.runtime.server.unknown_fields import without_unknown
from tests.runtime.server.test_bad_input import assert_refused
from tests.runtime.server.test_chat import USER, chat
from tests.runtime.server.test_completions import GREEDY, complete, events

WORDS = "When shall we three meet again in thunder lightning or in rain"


def ids_of(client: httpx.Client, text: str) -> list[int]:
    ids: list[int] = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


@pytest.mark.parametrize("side, part", [(None, slice(-5, None)), ("left", slice(-5, None)), ("right", slice(5))])
def test_prompts_are_cut_to_a_length(client: httpx.Client, side: str | None, part: slice) -> None:
    ids = ids_of(client, WORDS)
    fields = {"truncate_prompt_tokens": 5, "truncation_side": side, "return_token_ids": True, **GREEDY}
    for prompt in (WORDS, ids):
        answer = complete(client, prompt=prompt, **fields)
        assert answer["choices"][0]["prompt_token_ids"] == ids[part] and answer["usage"]["prompt_tokens"] == 5
    alone = complete(client, prompt=ids[part], **GREEDY)["choices"][0]["text"]
    assert answer["choices"][0]["text"] == alone


def test_a_prompt_beyond_the_model_is_cut_to_what_leaves_room(client: httpx.Client) -> None:
    long = WORDS * 60
    answer = complete(client, prompt=long, truncate_prompt_tokens=-1, max_tokens=6, temperature=0)
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 506, "completion_tokens": 6}
    body = {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": 40, "max_tokens": 3}
    assert chat(client, **body)["usage"]["prompt_tokens"] == 40
    for text in (long * 30, "x" * 500_000, "\N{GRINNING FACE}" * 100_000):
        assert complete(client, prompt=text, truncate_prompt_tokens=7, **GREEDY)["usage"]["prompt_tokens"] == 7
    assert "at least 1" in assert_refused(
        client.post("/v1/completions", json={"prompt": WORDS, "truncate_prompt_tokens": 0})
    )


def test_an_echo_shows_the_prompt_as_it_was_cut(client: httpx.Client) -> None:
    text = complete(client, prompt=WORDS, echo=True, truncate_prompt_tokens=3, **GREEDY)["choices"][0]["text"]
    assert not text.startswith("When") and " rain" in text


def test_banned_words_and_allowed_tokens(client: httpx.Client) -> None:
    text = complete(client, prompt=WORDS, **GREEDY)["choices"][0]["text"]
    word = text.split()[0]
    without = complete(client, prompt=WORDS, bad_words=[word], **GREEDY)["choices"][0]["text"]
    assert word in text and word not in without.split()
    allowed = ids_of(client, " to be or not")[1:]
    answer = complete(client, prompt=WORDS, allowed_token_ids=allowed, return_token_ids=True, **GREEDY)
    assert set(answer["choices"][0]["token_ids"]) <= set(allowed)
    assert_refused(client.post("/v1/completions", json={"prompt": WORDS, "allowed_token_ids": [10**7]}))


def test_dry_and_typical_sampling(client: httpx.Client) -> None:
    looped = complete(client, prompt="so so so so so so", temperature=0, max_tokens=24)["choices"][0]["text"]
    dry = {"dry_multiplier": 5.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": -1}
    free = complete(client, prompt="so so so so so so", temperature=0, max_tokens=24, **dry)["choices"][0]["text"]
    assert len(set(free.split())) > len(set(looped.split()))
    sampled = {"prompt": WORDS, "seed": 3, "max_tokens": 24, "temperature": 1.5}
    assert complete(client, **sampled)["choices"] != complete(client, **sampled, typical_p=0.1)["choices"]
    assert "typical_p" in assert_refused(client.post("/v1/completions", json={"prompt": WORDS, "typical_p": 0}))


def test_tokens_as_ids(client: httpx.Client) -> None:
    ids = complete(client, prompt=WORDS, return_token_ids=True, **GREEDY)["choices"][0]["token_ids"]
    asked = {"return_tokens_as_token_ids": True, **GREEDY}
    logprobs = complete(client, prompt=WORDS, logprobs=1, **asked)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in ids]
    entries = chat(client, logprobs=True, top_logprobs=2, **asked)["choices"][0]["logprobs"]["content"]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])


def test_the_prompt_that_the_template_made(client: httpx.Client) -> None:
    assert chat(client, return_prompt_text=True)["prompt_text"].endswith("[user] Good morrow\n[assistant] ")


NOTED: tuple[tuple[str, Any], ...] = (
    ("prediction", {"type": "content", "content": "Good"}),
    ("store", True),
    ("verbosity", "low"),
    ("thinking_token_budget", 5),
)


@pytest.mark.parametrize("name, value", NOTED)
def test_ignored_fields_are_told(client: httpx.Client, name: str, value: Any) -> None:
    (warning,) = chat(client, **{name: value})["warnings"]
    assert warning == f"{name} is ignored: {IGNORED[name]}"
    first, *others = events(client, "/v1/chat/completions", messages=USER, max_tokens=3, **{name: value})
    assert first["warnings"] == [warning] and not any("warnings" in chunk for chunk in others)


def test_fields_without_a_value_and_those_of_no_effect_are_not_told(client: httpx.Client) -> None:
    silent = {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y"}
    assert "warnings" not in chat(client, prediction=None, store=False, spaces_between_special_tokens=False, **silent)


def test_completions_tell_too(client: httpx.Client) -> None:
    assert len(complete(client, prompt=WORDS, vllm_xargs={"a": 1}, **GREEDY)["warnings"]) == 1
    first, *others = events(client, "/v1/completions", prompt=WORDS, vllm_xargs={"a": 1}, **GREEDY)
    assert len(first["warnings"]) == 1 and not any("warnings" in chunk for chunk in others)


@pytest.mark.parametrize("name", ["functions", "function_call", "audio", "web_search_options"])
def test_refused_fields_say_why(client: httpx.Client, name: str) -> None:
    body = {"messages": USER, "max_tokens": 2, name: {"x": 1}}
    assert REFUSED[name] in assert_refused(client.post("/v1/chat/completions", json=body))


PARTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "no images"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "no audio"),
    ({"type": "video_url", "video_url": {"url": "x"}}, "no videos"),
    ({"type": "file", "file": {"file_id": "x"}}, "no files"),
)


@pytest.mark.parametrize("part, said", PARTS)
def test_only_text_is_read(client: httpx.Client, part: dict[str, Any], said: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    message = assert_refused(client.post("/v1/chat/completions", json={"messages": messages}))
    assert message.startswith("this engine reads text only") and said in message
    spoken = client.post("/v1/chat/completions", json={"messages": USER, "modalities": ["text", "audio"]})
    assert "writes text only" in assert_refused(spoken)


def test_unknown_fields_are_found_at_every_depth() -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_toks": 5,
        "tools": [{"function": {"name": "f", "parameters": {"properties": {}}, "speed": 1}}],
        "tool_choice": {"function": {"name": "f", "loudly": True}},
        "functions": [],
    }
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate(body)
    left, names = without_unknown(body, raised.value.errors())
    assert sorted(names) == ["functions", "max_toks", "tool_choice.function.loudly"]
    assert ChatRequest.model_validate(left).max_tokens is None


def test_refused_fields_are_refused_in_any_case() -> None:
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate({"messages": USER, "functions": [{"name": "f"}]})
    assert without_unknown({"messages": USER, "functions": [{"name": "f"}]}, raised.value.errors())[1] == []
