"""POST /v1/completions over HTTP: prompts of every form, choices, echo, log-probabilities as lm-eval reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.runtime.server.conftest import MODEL

GREEDY = {"temperature": 0, "max_tokens": 6}


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def events(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer, which has to end with [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion(client: httpx.Client) -> None:
    answer = complete(client, prompt="The king", model="bard", **GREEDY)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["model"] == "bard"
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["text"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6


def test_every_form_of_prompt_gives_the_same(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "The king"}).json()["tokens"]
    alone = complete(client, prompt="The king", **GREEDY)["choices"][0]["text"]
    assert complete(client, prompt=ids, **GREEDY)["choices"][0]["text"] == alone
    for prompts in (["The king", "My lord"], [ids, ids[:1]]):
        choices = complete(client, prompt=prompts, **GREEDY)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["text"] == alone


def test_streams_say_the_same_as_whole_answers(client: httpx.Client) -> None:
    body = {"prompt": ["The king", "My lord, I"], **GREEDY, "max_tokens": 16}
    whole = complete(client, **body)
    chunks = events(client, "/v1/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]


def test_choices_seeds_and_stops(client: httpx.Client) -> None:
    sampled = {"prompt": "The king", "temperature": 1.0, "max_tokens": 8, "n": 3, "seed": 7}
    first = complete(client, **sampled)
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) > 1
    assert [choice["text"] for choice in complete(client, **sampled)["choices"]] == texts
    assert first["usage"]["completion_tokens"] == 24
    text = complete(client, prompt="The king", temperature=0, max_tokens=20)["choices"][0]["text"]
    stop = text[4:7]
    stopped = complete(client, prompt="The king", temperature=0, max_tokens=20, stop=[stop])["choices"][0]
    assert stopped["text"] == text[: text.index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)


def test_beam_search_is_at_least_as_likely_as_greedy(client: httpx.Client) -> None:
    body = {"prompt": "The king", "max_tokens": 5, "logprobs": 0, "length_penalty": 0.0}
    greedy = complete(client, **body, temperature=0)["choices"][0]["logprobs"]["token_logprobs"]
    beams = complete(client, **body, use_beam_search=True, n=3)["choices"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in beams]
    assert len(beams) == 3 and sums == sorted(sums, reverse=True)
    assert sums[0] >= sum(greedy) - 1e-4


def test_log_probabilities_are_those_of_transformers(client: httpx.Client, engine_directory: Path) -> None:
    """As lm-eval's local-completions asks: token ids, echo, one token, logprobs=1."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(MODEL, dtype=torch.float32).eval()
    prompts = [[5, 99, 230, 17, 640], [12, 31, 77]]
    answer = complete(client, model="bard", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1)
    for ids, choice in zip(prompts, sorted(answer["choices"], key=lambda c: c["index"]), strict=True):
        logprobs = choice["logprobs"]
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        assert logprobs["token_logprobs"][0] is None
        assert len(logprobs["token_logprobs"]) == len(ids) + 1
        for position, token in enumerate(ids[1:]):
            assert logprobs["token_logprobs"][position + 1] == pytest.approx(float(expected[position, token]), abs=1e-3)
            top = max(logprobs["top_logprobs"][position + 1].values())
            assert top == pytest.approx(float(expected[position].max()), abs=1e-3)
        assert logprobs["token_logprobs"][-1] == pytest.approx(float(expected[-1].max()), abs=1e-3)
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(logprobs["top_logprobs"])
        assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])


@pytest.mark.parametrize("prompt", ["é I am", "naïve 🙂🙂 café", [5, 99, 230, 17, 640, 127, 4]])
def test_offsets_are_offsets_into_the_text(client: httpx.Client, prompt: object) -> None:
    """Where tokens are parts of characters, and where a stop string is left out; the same in streams."""
    asked = {"prompt": prompt, "echo": True, "logprobs": 0, "temperature": 1, "seed": 3, "max_tokens": 12}
    for more in (
        {"guided_regex": "(é|🙂| über|東){4}"},
        {},
        {"stop": ["e", " "]},
        {"ignore_eos": True, "logit_bias": {"0": 9}},
    ):
        whole = complete(client, **asked, **more)["choices"][0]
        text, logprobs = whole["text"], whole["logprobs"]
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets) and all(0 <= offset <= len(text) for offset in offsets)
        for token, offset in zip(logprobs["tokens"], offsets, strict=True):
            left_out = offset == len(text) or token.startswith(("bytes:", "<|"))
            assert left_out or text[offset:].startswith(token) or token.startswith(text[offset:]), (token, offset, text)
        chunks = [c["choices"][0]["logprobs"] for c in events(client, "/v1/completions", **asked, **more)]
        assert [token for chunk in chunks for token in chunk["tokens"]] == logprobs["tokens"]
        streamed = [offset for chunk in chunks for offset in chunk["text_offset"]]
        assert all(
            min(streamed_offset, len(text)) == two for streamed_offset, two in zip(streamed, offsets, strict=True)
        )


def test_echo_alone_and_streamed(client: httpx.Client) -> None:
    only = complete(client, prompt="The king", max_tokens=0, echo=True, logprobs=1)
    assert only["choices"][0]["text"] == "The king"
    assert only["usage"]["completion_tokens"] == 0
    assert len(only["choices"][0]["logprobs"]["tokens"]) == only["usage"]["prompt_tokens"]
    chunks = events(client, "/v1/completions", prompt="The king", echo=True, logprobs=0, **GREEDY)
    assert chunks[0]["choices"][0]["text"].startswith("The king")
    whole = complete(client, prompt="The king", echo=True, logprobs=0, **GREEDY)["choices"][0]
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"]
    tokens = [token for c in chunks for token in c["choices"][0]["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]


def test_prompt_logprobs_and_token_ids_as_vllm_gives_them(client: httpx.Client) -> None:
    choice = complete(client, prompt=[5, 99, 230], prompt_logprobs=2, return_token_ids=True, **GREEDY)["choices"][0]
    assert choice["prompt_token_ids"] == [5, 99, 230] and len(choice["token_ids"]) == 6
    assert choice["prompt_logprobs"][0] is None
    entry = choice["prompt_logprobs"][1]["99"]
    assert set(entry) == {"logprob", "rank", "decoded_token"} and entry["rank"] >= 1
    assert 2 <= len(choice["prompt_logprobs"][1]) <= 3


def test_a_deadline_ends_a_request(client: httpx.Client) -> None:
    choice = complete(client, prompt="The king", max_tokens=480, ignore_eos=True, deadline_seconds=0.001)["choices"][0]
    assert choice["finish_reason"] == "deadline"


def test_tokenize_and_detokenize(client: httpx.Client) -> None:
    text = "Łódź — “quoted” 😀"
    tokenized = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert (
        tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
        and tokenized["max_model_len"] == 512
    )
    assert client.post("/detokenize", json={"tokens": tokenized["tokens"]}).json()["prompt"] == text
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    prompt = client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert prompt == "<|bos|>[user] Hi\n[assistant] "
