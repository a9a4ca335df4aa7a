"""Which replica a request goes to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmc.runtime.server.replicas.routing import Candidate, Router, Routing, prefix_digests, prompt_of

SYSTEM = "You are a helpful assistant who answers in the manner of Shakespeare. " * 4


def candidates(*in_flight: int) -> list[Candidate]:
    return [Candidate(index, count) for index, count in enumerate(in_flight)]


def test_the_least_loaded_is_chosen() -> None:
    router = Router(Routing.LEAST_LOADED)
    assert router.choose(candidates(3, 1, 2), "x") == 1
    assert router.choose(candidates(2, 2, 2), SYSTEM) == 0


def test_a_known_prefix_wins_over_a_small_difference_in_load() -> None:
    router = Router(Routing.PREFIX, slack=4)
    assert router.choose(candidates(1, 0), SYSTEM + "a") == 1
    assert router.choose(candidates(0, 3), SYSTEM + "b") == 1
    assert router.choose(candidates(0, 5), SYSTEM + "c") == 0, "the preferred one is too busy"
    assert router.choose(candidates(0, 0), "quite another prompt " * 9) == 0


def test_the_longest_known_prefix_wins() -> None:
    router = Router(Routing.PREFIX)
    talk = SYSTEM + "and now a long conversation " * 20
    assert router.choose(candidates(0, 1), SYSTEM) == 0
    assert router.choose([Candidate(1, 0)], talk) == 1
    assert router.choose(candidates(0, 2), talk + "with another turn") == 1


def test_a_lost_replica_is_forgotten() -> None:
    router = Router(Routing.PREFIX)
    assert router.choose(candidates(1, 0), SYSTEM) == 1
    router.forget(1)
    assert router.choose(candidates(0, 1), SYSTEM) == 0
    assert router.choose([Candidate(1, 0)], SYSTEM) == 1, "the remembered one is not there"


def test_digests_are_of_beginnings() -> None:
    assert prefix_digests("x" * 63) == []
    assert len(prefix_digests("x" * 64)) == 1
    long = prefix_digests("x" * 1000)
    assert len(long) == 4 and long[0] == prefix_digests("x" * 64 + "y" * 99)[0]


@pytest.mark.parametrize(
    "body, prompt",
    [
        ({"prompt": "a"}, "\0a"),
        ({"prompt": "a", "cache_salt": "s"}, "s\0a"),
        ({"prompt": [1, 2]}, "\0[1, 2]"),
        ({"prompt": ["a", "b"]}, "\0a"),
        ({"messages": [{"role": "user"}]}, '\0[null, [{"role": "user"}]]'),
        ({"input": "a", "instructions": "b"}, '\0[null, ["b", "a"]]'),
        ({"tokens": [1]}, None),
        ([1], None),
        ("{", None),
    ],
)
def test_what_a_prefix_is_judged_by(body: Any, prompt: str | None) -> None:
    assert prompt_of(body.encode() if isinstance(body, str) else json.dumps(body).encode()) == prompt
