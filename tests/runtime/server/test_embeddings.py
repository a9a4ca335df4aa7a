"""Vectors and scores over HTTP: openai-python against /v1/embeddings, and what rerankers' clients send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.runtime.server.conftest import LiveServer, serving

openai: Any = pytest.importorskip("openai", reason="openai is not installed")
TEXTS = ["The king is dead.", "Once upon a time", "O"]


@pytest.fixture(scope="module")
def live(embedder: Path) -> Iterator[LiveServer]:
    with serving(embedder) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(embedder: Path) -> Any:
    import llmc

    with llmc.load(embedder) as engine:
        return engine.embed(TEXTS)


def test_openai_gets_the_engines_vectors(live: LiveServer, expected: Any) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        # openai-python asks for base64 unless told otherwise.
        packed = client.embeddings.create(model="bard", input=TEXTS)
        plain = client.embeddings.create(model="bard", input=TEXTS, encoding_format="float")
        single = client.embeddings.create(model="bard", input=TEXTS[0], dimensions=7)
    assert [entry.index for entry in packed.data] == [0, 1, 2]
    for answer in (packed, plain):
        assert np.array_equal(np.array([entry.embedding for entry in answer.data], np.float32), expected)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > len(TEXTS)
    assert np.array_equal(np.float32(single.data[0].embedding), expected[0][:7])


def test_token_ids_are_read_too(live: LiveServer, expected: Any) -> None:
    with live.client() as client:
        ids = client.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
        for given in (ids, [ids]):
            (row,) = client.post("/v1/embeddings", json={"input": given}).json()["data"]
            assert np.array_equal(np.float32(row["embedding"]), expected[0])


def test_prompts_are_named(live: LiveServer) -> None:
    with live.client() as client:
        named = client.post("/v1/embeddings", json={"input": TEXTS, "prompt_name": "riddle"}).json()["data"]
        written = client.post("/v1/embeddings", json={"input": [f"What am I? {text}" for text in TEXTS]}).json()["data"]
    assert named == written


def test_an_embedder_ranks_by_cosines(live: LiveServer, expected: Any) -> None:
    units = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    wanted = units[1:] @ units[0]
    with live.client() as client:
        body = {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1}
        ranked = client.post("/v1/rerank", json=body).json()["results"]
        scored = client.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()["data"]
    best = int(wanted.argmax())
    assert [(entry["index"], entry["document"]["text"]) for entry in ranked] == [(best, TEXTS[1:][best])]
    assert np.allclose([entry["score"] for entry in scored], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"input": "O " * 200}, "201 tokens, and this engine reads at most 64"),
        ("/v1/embeddings", {"input": [5] * 65}, "reads at most 64"),
        ("/v1/embeddings", {"input": TEXTS, "dimensions": 4096}, "the vectors have"),
        ("/v1/embeddings", {"input": []}, "at least 1 item"),
        ("/v1/embeddings", {"input": "O", "prompt_name": "document"}, "no prompt 'document'; it has 'query', 'riddle'"),
        ("/v1/classify", {"input": TEXTS}, "built for embed, not for classify"),
        (
            "/v1/completions",
            {"prompt": TEXTS},
            "vectors of texts (embed, or POST /v1/embeddings) and generates no text",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "O"}]}, "POST /v1/embeddings"),
        ("/v1/responses", {"input": "O"}, "POST /v1/embeddings"),
    ],
)
def test_what_cannot_be_served_is_a_400(live: LiveServer, path: str, body: dict[str, Any], said: str) -> None:
    with live.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code in (400, 422) and said in answer.text, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a" * 1_000_000}),
        ("/v1/embeddings", {"input": ["O", "O " * 100_000]}),
        ("/v1/rerank", {"query": "O " * 100_000, "documents": ["O"] * 2048}),
        ("/v1/score", {"text_1": "O", "text_2": ["O", "a" * 1_000_000]}),
    ],
)
def test_a_text_with_more_characters_than_its_tokens_can_have_is_not_read(
    live: LiveServer, path: str, body: dict[str, Any]
) -> None:
    """Its tokens are not counted: a million characters of one word take seconds, which nobody waits for."""
    with live.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "at least" in answer.text and "characters), and this engine reads at most 64" in answer.text


def test_of_a_long_text_only_what_is_kept_is_read(live: LiveServer) -> None:
    with live.client() as client:
        whole = client.post("/v1/embeddings", json={"input": "O " * 200, "truncate_prompt_tokens": 20}).json()
        for side, text in (("right", "O " * 200 + "a" * 900_000), ("left", "a" * 900_000 + " O" * 200)):
            body = {"input": text, "truncate_prompt_tokens": 20, "truncation_side": side}
            content = client.post("/v1/embeddings", json=body).json()
            assert content["usage"]["prompt_tokens"] == 20
            if side == "right":
                assert content["data"] == whole["data"]


def test_a_query_is_read_once(live: LiveServer) -> None:
    """Scores are those of a query for each document."""
    documents = [f"The {i}th king" for i in range(30)]
    with live.client() as client:
        once = client.post("/v1/score", json={"text_1": TEXTS[0], "text_2": documents}).json()
        separately = client.post("/v1/score", json={"text_1": [TEXTS[0]] * 30, "text_2": documents}).json()
        (query,) = client.post("/v1/embeddings", json={"input": [TEXTS[0]]}).json()["data"]
        tokens = client.post("/tokenize", json={"prompt": TEXTS[0]}).json()["count"]
    assert [entry["score"] for entry in once["data"]] == [entry["score"] for entry in separately["data"]]
    assert separately["usage"]["prompt_tokens"] - once["usage"]["prompt_tokens"] == 29 * tokens and query["index"] == 0


def test_long_texts_are_cut_where_asked(live: LiveServer) -> None:
    with live.client() as client:
        body = {"input": [5] * 65, "truncate_prompt_tokens": -1}
        cut = client.post("/v1/embeddings", json=body).json()
        whole = client.post("/v1/embeddings", json={"input": [5] * 64}).json()
    assert cut["usage"]["prompt_tokens"] == 64 and cut["data"] == whole["data"]


def test_a_server_of_completions_gives_no_vectors(client: httpx.Client) -> None:
    answer = client.post("/v1/embeddings", json={"input": "The king"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith("the engine generates") and "task=embed" in message
    assert "complet" not in message, "that is not what was asked for"
