"""Requests that cannot be served: a 4xx in OpenAI's shape, soon, and the server goes on."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest

USER = [{"role": "user", "content": "hi"}]
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

# path, body, part of the message
BAD: tuple[tuple[str, Any, str], ...] = (
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
    ("/v1/completions", {"prompt": [10**9]}, "1000000000"),
    ("/v1/completions", {"prompt": [10**30]}, "prompt"),
    ("/v1/completions", {"prompt": DEEP}, "prompt"),
    ("/v1/completions", {"prompt": "word " * 3000}, "512"),
    ("/v1/completions", {"prompt": [5] * 600}, "512"),
    ("/v1/completions", {"prompt": "\ud800"}, "surrogate"),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 600}, "512"),
    ("/v1/completions", {"prompt": "hi", "max_tokens": -1}, "max_tokens"),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 0}, "echo"),
    ("/v1/completions", {"prompt": "hi", "n": 0}, "n cannot be 0"),
    ("/v1/completions", {"prompt": "hi", "n": 10**6}, "n cannot be"),
    ("/v1/completions", {"prompt": "hi", "logprobs": 5000}, "logprobs"),
    ("/v1/completions", {"prompt": "hi", "temperature": -1}, "temperature"),
    ("/v1/completions", {"prompt": "hi", "temperature": "NaN"}, "temperature"),
    ("/v1/completions", {"prompt": "hi", "top_p": 0}, "top_p"),
    ("/v1/completions", {"prompt": "hi", "repetition_penalty": 5e-324}, "repetition_penalty"),
    ("/v1/completions", {"prompt": "hi", "logit_bias": {"5": 1e308}}, "logit_bias"),
    ("/v1/completions", {"prompt": "hi", "logit_bias": {"x": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "hi", "logit_bias": {"99999999": 1}}, "99999999"),
    ("/v1/completions", {"prompt": "hi", "stop": [""]}, "stop"),
    ("/v1/completions", {"prompt": "hi", "stop": ["x"] * 99}, "stop"),
    ("/v1/completions", {"prompt": ["hi"] * 1024, "n": 2}, "2048"),
    ("/v1/completions", {"prompt": [[5]] * 1024, "n": 128}, "131072"),
    ("/v1/completions", {"prompt": ["hi"] * 64, "best_of": 128}, "8192"),
    ("/v1/completions", {"prompt": ["hi"] * 16, "n": 100, "use_beam_search": True, "stream": True}, "1600"),
    ("/v1/completions", {"prompt": "hi", "suffix": "x"}, "suffix"),
    ("/v1/completions", {"prompt": "hi", "max_toks": 1}, "max_toks"),
    ("/v1/completions", {"prompt": "hi", "best_of": 1, "n": 2}, "best_of"),
    ("/v1/completions", {"prompt": "hi", "stream_options": {}}, "stream_options"),
    ("/v1/completions", {"prompt": "hi", "use_beam_search": True, "guided_regex": "a"}, "beam"),
    ("/v1/completions", {"prompt": "hi", "guided_regex": "a", "guided_choice": ["b"]}, "together"),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "hi", "cache_salt": ""}, "cache_salt"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "role"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "no content"),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": None}]}, "no content"),
    ("/v1/chat/completions", {"messages": USER, "tool_choice": "required"}, "tools"),
    ("/v1/chat/completions", {"messages": USER, "top_logprobs": 2}, "logprobs=true"),
    ("/v1/chat/completions", {"messages": USER, "tools": [{"function": {"name": "a b"}}]}, "tools"),
    (
        "/v1/chat/completions",
        {"messages": USER, "tools": [{"function": {"name": "f"}}], "tool_choice": {"function": {"name": "g"}}},
        "'g'",
    ),
    ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "yaml"}}, "response_format"),
    ("/v1/chat/completions", {"messages": USER, "chat_template": "{% if %}"}, "template"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "name",
    ),
    ("/v1/chat/completions", {"messages": USER, "continue_final_message": True}, "exclude"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "either"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**7]}, "10000000"),
)


def assert_refused(answer: httpx.Response, status: int = 400) -> str:
    """In OpenAI's error shape, without a traceback; returns the message."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text and 'File "' not in answer.text
    message: str = error["message"]
    return message


@pytest.mark.parametrize("path, body, part", BAD, ids=[f"{i}-{part}" for i, (_, _, part) in enumerate(BAD)])
def test_bad_fields(path: str, body: Any, part: str, client: httpx.Client) -> None:
    # ensure_ascii lets half of a surrogate pair through, as other clients' encoders do.
    answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert part in f"{assert_refused(answer)} {error['param']}"


BOMBS: dict[str, dict[str, Any]] = {
    "regex": {"guided_regex": "(a{1,9999}){1,9999}"},
    "nested regex": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    "schema": {"guided_json": {"type": "string", "minLength": 10**9, "maxLength": 10**10}},
    "slow schema": {"guided_json": {"type": "integer", "multipleOf": 9999991}},
    "deep schema": {"guided_json": json.dumps(DEEP)},
    "broken schema": {"guided_json": "{"},
    "unknown type": {"guided_json": {"type": "unicorn"}},
    "left recursion": {"guided_grammar": 'start: start start | "a"'},
    "broken grammar": {"guided_grammar": "start: ("},
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_as_constraints(name: str, client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4, **BOMBS[name]})
    assert answer.status_code == 400 or (answer.status_code == 200 and name in ("schema", "regex", "left recursion")), (
        answer.text
    )
    if answer.status_code == 400:
        assert_refused(answer)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "template",
    ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' * 3000000000 }}"],
)
def test_bombs_as_templates(template: str, client: httpx.Client) -> None:
    body = {"messages": USER, "chat_template": template, "max_tokens": 2}
    assert "template" in assert_refused(client.post("/v1/chat/completions", json=body))
    assert client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_has_passed_before_the_prompt_was_read(stream: bool, client: httpx.Client) -> None:
    """What was not computed has no log-probability; every list is as long as the tokens."""
    body = {"prompt": [5, 6, 7, 8], "echo": True, "logprobs": 2, "max_tokens": 4, "deadline_seconds": 1e-9}
    answer = client.post("/v1/completions", json={**body, "prompt_logprobs": 1, "stream": stream})
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    (choice,) = json.loads(events[0] if stream else answer.text)["choices"]
    assert choice["finish_reason"] == "deadline"
    lengths = {name: len(values) for name, values in choice["logprobs"].items()}
    assert lengths == {"tokens": 4, "text_offset": 4, "token_logprobs": 4, "top_logprobs": 4}
    assert choice["logprobs"]["token_logprobs"] == [None] * 4
    if not stream:
        assert choice["prompt_logprobs"] == [None] * 4


def test_unknown_routes_methods_and_models(client: httpx.Client) -> None:
    assert_refused(client.get("/v1/nothing"), 404)
    assert_refused(client.get("/v1/completions"), 405)
    assert "gpt-9" in assert_refused(client.post("/v1/completions", json={"prompt": "hi", "model": "gpt-9"}), 404)
    assert client.get("/v1/models/bard").json()["id"] == "bard"
    assert_refused(client.get("/v1/models/gpt-9"), 404)


def test_bodies_that_are_no_json(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}'):
        assert_refused(client.post("/v1/completions", content=content, headers=headers))
    assert_refused(client.post("/v1/completions", content=b'{"prompt": "hi"}', headers={"Content-Type": "text/plain"}))


def test_bodies_that_are_too_large(client: httpx.Client) -> None:
    big = {"prompt": "x" * (5 << 20)}
    assert "bytes" in assert_refused(client.post("/v1/completions", json=big), 413)

    def parts() -> Any:
        for _ in range(100):
            yield b" " * (1 << 16)

    # The server may have answered and closed while the client was still sending.
    with contextlib.suppress(httpx.WriteError):
        assert_refused(client.post("/v1/completions", content=parts()), 413)
    assert client.get("/health").status_code == 200


def test_long_texts_are_refused_before_all_of_them_is_read(client: httpx.Client) -> None:
    for text in ("x y " * 900_000, "x" * 3_600_000, " " * 3_600_000):
        assert "512" in assert_refused(client.post("/v1/completions", json={"prompt": text}))
        assert "8192" in assert_refused(client.post("/tokenize", json={"prompt": text}))
    words = {"prompt": "word " * 3000}
    assert 512 < client.post("/tokenize", json=words).json()["count"] < 8192
