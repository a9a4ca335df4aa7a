"""Random bodies: whatever comes, no 5xx, an answer in OpenAI's shape, and a server that goes on."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import httpx
import pytest

from tests.runtime.server.conftest import LiveServer

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 17, 10**6, 2**31, 2**63, -(2**63), 10**40, 0.0, 0.5, -0.5, 1e308, "", "a", "0",
    "\x00", "\ud800", "😀" * 50, "x" * 5000, [], [[]], [0], [1, 2, 3], [-1], ["a"], [None], [1, "a"], {},
    {"type": "text"},
    {"a": {"a": {"a": []}}}, [{"role": "user", "content": "hi"}], [{"role": "tool"}], {"type": "json_object"},
    {"include_usage": True}, "required", "auto", {"5": 100}, {"5": "x"}, [{"function": {"name": "f"}}],
)  # fmt: skip
COMPLETION: dict[str, Any] = {"prompt": "The king", "max_tokens": 3}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
FIELDS = (
    "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "best_of", "temperature", "top_p", "top_k",
    "min_p", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "response_format", "tools",
    "tool_choice", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens", "use_beam_search",
    "length_penalty", "priority", "cache_salt", "deadline_seconds", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "bad_words", "allowed_token_ids", "typical_p", "dry_multiplier",
    "dry_sequence_breakers", "truncate_prompt_tokens", "reasoning_effort", "prediction", "functions",
    "input", "instructions", "max_output_tokens", "previous_response_id", "text", "reasoning", "include", "truncation",
    "metadata", "store", "chat_template", "chat_template_kwargs", "user", "model", "suffix", "unknown",
)  # fmt: skip


def fuzzed(generator: random.Random) -> tuple[str, Any]:
    """A path and a body that was valid before some of it was replaced."""
    path, base = generator.choice(
        (
            ("/v1/completions", COMPLETION),
            ("/v1/chat/completions", CHAT),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
        )
    )
    body: Any = copy.deepcopy(base)
    for _ in range(generator.randint(1, 4)):
        body[generator.choice(FIELDS)] = generator.choice(VALUES)
    if generator.random() < 0.05:
        body = generator.choice(VALUES)
    return path, body


def ask(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    content = json.dumps(body)
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


def run_fuzz(client: httpx.Client, count: int, seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(count):
        path, body = fuzzed(generator)
        answer = ask(client, path, body)
        shown = f"{path} {body!r:.300} -> {answer.status_code} {answer.text:.300}"
        assert answer.status_code < 500, shown
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], shown
    assert ask(client, "/v1/completions", COMPLETION).status_code == 200
    assert client.get("/health").status_code == 200


def test_random_bodies(client: httpx.Client) -> None:
    run_fuzz(client, 250, seed=1)


@pytest.mark.slow
def test_two_thousand_random_bodies(client: httpx.Client) -> None:
    run_fuzz(client, 2000, seed=2)


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(server: LiveServer) -> None:
    """Bodies drawn from the server's own OpenAPI description, valid and invalid."""
    schemathesis: Any = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    import hypothesis

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    cases = schema.as_strategy()

    @hypothesis.settings(max_examples=300, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=cases)
    def no_server_error(case: Any) -> None:
        if case.path != "/metrics":
            assert case.call(base_url=server.url, timeout=60).status_code < 500

    no_server_error()
