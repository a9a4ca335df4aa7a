"""Which replica a request goes to: the least loaded one, or the one that has seen the longest part of its prompt."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Prefixes are remembered at these many characters, doubling: a hit is at most twice as long as the remembered prefix.
_SHORTEST = 64
_LONGEST = 1 << 16
_REMEMBERED = 100_000


class Routing(Enum):
    """LEAST_LOADED: fewest requests in flight. PREFIX: the replica with the longest known prefix, unless it is busy."""

    LEAST_LOADED = "least-loaded"
    PREFIX = "prefix"


@dataclass(frozen=True)
class Candidate:
    """A replica that can be chosen. in_flight: requests that it has now."""

    index: int
    in_flight: int


class Router:
    """Chooses replicas and remembers which prefixes each has seen.

    slack: number of requests by which a replica chosen for its prefix may exceed the least loaded one.
    """

    def __init__(self, routing: Routing, slack: int = 4) -> None:
        self._routing = routing
        self._slack = slack
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, candidates: Sequence[Candidate], prompt: str | None) -> int:
        """The index of one of the candidates (at least one). prompt: None means no prefix."""
        least = min(candidates, key=lambda c: (c.in_flight, c.index))
        if self._routing is Routing.LEAST_LOADED or prompt is None:
            return least.index
        digests = prefix_digests(prompt)
        by_index = {c.index: c for c in candidates}
        known = (self._seen[digest] for digest in reversed(digests) if digest in self._seen)
        preferred = next((by_index[index] for index in known if index in by_index), least)
        chosen = preferred if preferred.in_flight <= least.in_flight + self._slack else least
        self._remember(digests, chosen.index)
        return chosen.index

    def forget(self, index: int) -> None:
        """Forget the cached prefixes of a replica that has lost its cache."""
        for digest in [digest for digest, seen in self._seen.items() if seen == index]:
            del self._seen[digest]

    def _remember(self, digests: Sequence[bytes], index: int) -> None:
        for digest in digests:
            self._seen[digest] = index
            self._seen.move_to_end(digest)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)


def prefix_digests(prompt: str) -> list[bytes]:
    """Digests of the prompt's beginnings, shortest first; none for a prompt shorter than a cached block."""
    digests, length = [], _SHORTEST
    while length <= min(len(prompt), _LONGEST):
        digests.append(hashlib.blake2b(prompt[:length].encode("utf-8", "replace"), digest_size=12).digest())
        length *= 2
    return digests


def previous_response_of(body: bytes) -> str | None:
    """The stored response that a request of /v1/responses continues from, which one replica has; None for none."""
    identity = _fields(body).get("previous_response_id") if b"previous_response_id" in body else None
    return identity if isinstance(identity, str) else None


def prompt_of(body: bytes) -> str | None:
    """The text that determines a request's prefix: its salt, then its prompt, messages or input; None without them."""
    content = _fields(body)
    prompt = content.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if prompt is None:
        turns = content.get("messages") or (content.get("input") and [content.get("instructions"), content["input"]])
        prompt = [content.get("tools"), turns] if turns else None
    if prompt is None:
        return None
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return f"{content.get('cache_salt') or ''}\0{text}"


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object; empty if the body is not one, which the replica reports."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
