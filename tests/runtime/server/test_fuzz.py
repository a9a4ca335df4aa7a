"""Random bodies: whatever comes, no 5xx, an answer in OpenAI's shape, and a server that goes on."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.runtime.server.conftest import LiveServer, serving

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
    "documents", "query", "text_1", "text_2", "top_n", "dimensions", "encoding_format", "prompt_name", "normalize",
    "truncation_side", "add_special_tokens", "tokens", "return_token_strs", "use_activation",
    "metadata", "store", "chat_template", "chat_template_kwargs", "user", "model", "suffix", "unknown",
)  # fmt: skip


ROUTES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v1/score": {"text_1": "a", "text_2": ["b"]},
    "/v1/classify": {"input": ["a"]},
}


def fuzzed(generator: random.Random) -> tuple[str, Any]:
    """A path and a body that was valid before some of it was replaced."""
    path, base = generator.choice(tuple(ROUTES.items()))
    body: Any = copy.deepcopy(dict(base))
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
    assert client.get("/health").status_code == 200


def test_random_bodies(client: httpx.Client) -> None:
    run_fuzz(client, 250, seed=1)
    assert ask(client, "/v1/completions", COMPLETION).status_code == 200


# A neighbour's request, and what of its answer must have the same bits whatever comes beside it.
NEIGHBOURS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "generator": ("/v1/completions", {**COMPLETION, "max_tokens": 24, "temperature": 0, "logprobs": 2}, "choices"),
    "embedder": ("/v1/embeddings", {"input": ["The king is dead.", "O"]}, "data"),
}


@pytest.fixture(params=NEIGHBOURS)
def attacked(
    request: pytest.FixtureRequest, engine_directory: Path, embedder: Path
) -> Iterator[tuple[LiveServer, str]]:
    """A server of its own, whose every word can be read afterwards, and what it serves."""
    paths = {"generator": engine_directory, "embedder": embedder}
    with serving(paths[request.param], "--trust-request-chat-template") as live:
        yield live, request.param


@pytest.mark.slow
def test_ten_thousand_random_bodies_beside_a_neighbour(attacked: tuple[LiveServer, str]) -> None:
    live, kind = attacked
    path, body, name = NEIGHBOURS[kind]
    stop = Event()

    def answer(client: httpx.Client) -> Any:
        response = ask(client, path, body)
        assert response.status_code == 200, response.text
        return response.json()[name]

    def neighbour() -> int:
        count = 0
        with live.client() as client:
            while not stop.is_set():
                assert answer(client) == alone
                count += 1
        return count

    def attack(seed: int) -> None:
        with live.client() as client:
            run_fuzz(client, 2500, seed)

    with live.client() as client, ThreadPoolExecutor(5) as threads:
        alone = answer(client)
        watching = threads.submit(neighbour)
        try:
            for attacking in [threads.submit(attack, seed) for seed in range(100, 104)]:
                attacking.result()
        finally:
            stop.set()
        assert watching.result() > 100 and answer(client) == alone


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
