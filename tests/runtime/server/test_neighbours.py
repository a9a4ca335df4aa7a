"""While others attack: the same tokens as alone, an event loop that lives, and each attack is answered in time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.runtime.server.conftest import ANSWER_SECONDS, LiveServer
from tests.runtime.server.test_bad_input import DEEP, assert_refused
from tests.runtime.server.test_slow_clients import SLOW, all_of, connected

GREEDY = {"prompt": "The king", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
BOMBS = 6
# What no request may wait longer for than this, on a machine that tests keep busy.
LOOP_SECONDS = 0.6


def streamed(client: httpx.Client) -> list[int]:
    """The tokens of a greedy completion, as they come."""
    body = {**GREEDY, "stream": True, "return_token_ids": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [token for line in lines for choice in json.loads(line)["choices"] for token in choice["token_ids"]]


def test_neighbours_of_attacks(server: LiveServer, client: httpx.Client) -> None:
    def complete(**fields: Any) -> httpx.Response:
        with server.client() as own:
            return own.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, **fields})

    def bomb(index: int) -> None:
        assert_refused(complete(guided_json={"type": "integer", "multipleOf": 9999991 - index}))

    def good_grammar() -> None:
        answer = complete(guided_choice=["yes", f"no {time.time()}"], max_tokens=40)
        assert answer.status_code == 200, answer.text
        assert answer.elapsed.total_seconds() < ANSWER_SECONDS
        assert answer.json()["choices"][0]["text"].startswith(("yes", "no"))

    def bad_bodies() -> None:
        for fields in ({"prompt": DEEP}, {"prompt": ["hi"] * 1024, "n": 128}, {"prompt": "x " * 900_000}, {"n": 10**6}):
            assert_refused(complete(**fields))

    def many_outputs() -> None:
        assert len(complete(prompt=["hi"] * 64, n=16, max_tokens=1).json()["choices"]) == 1024

    def slow(send: Callable[[Any], None]) -> None:
        begin = time.monotonic()
        with connected(server) as raw:
            send(raw)
            assert b"HTTP/1.1 408" in all_of(raw)
        assert time.monotonic() - begin < ANSWER_SECONDS

    good_grammar()  # The workers of a server that has just started are there now.
    alone = streamed(client)
    assert len(alone) == GREEDY["max_tokens"]
    with ThreadPoolExecutor(32) as threads:
        attacks = [threads.submit(bomb, index) for index in range(BOMBS)]
        attacks += [threads.submit(slow, send) for send in SLOW]
        attacks += [threads.submit(attack) for attack in (good_grammar, bad_bodies, many_outputs)]
        runs = 0
        while not all(attack.done() for attack in attacks):
            assert streamed(client) == alone
            health = client.get("/health")
            assert health.status_code == 200 and health.elapsed.total_seconds() < LOOP_SECONDS
            runs += 1
        for attack in attacks:
            attack.result()
    assert runs > 2
