"""While others attack: the same tokens as alone, a server that lives, and each attack is answered."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.runtime.server.conftest import LiveServer
from tests.runtime.server.test_bad_input import DEEP, assert_refused
from tests.runtime.server.test_slow_clients import SLOW, all_of, connected

GREEDY = {"prompt": "The king", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
BOMBS = 6


def streamed(client: httpx.Client) -> list[int]:
    """The tokens of a greedy completion, as they come."""
    body = {**GREEDY, "stream": True, "return_token_ids": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [token for line in lines for choice in json.loads(line)["choices"] for token in choice["token_ids"]]


def test_neighbours_of_attacks(server: LiveServer, client: httpx.Client) -> None:
    fresh = itertools.count()

    def complete(**fields: Any) -> httpx.Response:
        with server.client() as own:
            return own.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, **fields})

    def bomb(index: int) -> None:
        answer = complete(guided_json={"type": "integer", "multipleOf": 9999991 - index})
        # Unless the workers that it needs are still starting.
        assert_refused(answer, 503 if answer.status_code == 503 else 400)

    def good_grammar() -> None:
        while (answer := complete(guided_choice=["yes", f"no {next(fresh)}"], max_tokens=40)).status_code == 503:
            assert "try again later" in answer.text
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].startswith(("yes", "no"))

    def bad_bodies() -> None:
        for fields in ({"prompt": DEEP}, {"prompt": ["hi"] * 1024, "n": 128}, {"prompt": "x " * 900_000}, {"n": 10**6}):
            assert_refused(complete(**fields))

    def many_outputs() -> None:
        assert len(complete(prompt=["hi"] * 64, n=16, max_tokens=1).json()["choices"]) == 1024

    def slow(send: Callable[[Any], None]) -> None:
        # A connection that is ended while more of the request arrives is reset, and its answer may be lost.
        with connected(server) as raw, contextlib.suppress(ConnectionResetError, BrokenPipeError):
            send(raw)
            assert b"HTTP/1.1 408" in all_of(raw)

    good_grammar()  # The workers of a server that has just started are there now.
    alone = streamed(client)
    assert len(alone) == GREEDY["max_tokens"]
    with ThreadPoolExecutor(32) as threads:
        attacks = [threads.submit(bomb, index) for index in range(BOMBS)]
        attacks += [threads.submit(slow, send) for send in SLOW]
        attacks += [threads.submit(attack) for attack in (good_grammar, bad_bodies, many_outputs)]
        assert streamed(client) == alone
        while not all(attack.done() for attack in attacks):
            assert streamed(client) == alone
            assert client.get("/health").status_code == 200
        for attack in attacks:
            attack.result()
