"""Answers to requests without chance, kept for when the same request comes again."""

from collections import OrderedDict
from dataclasses import dataclass, fields
from hashlib import sha256
from threading import Lock

from llmc.runtime.engine_stats import CacheStats
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.requests.request_output import ChoiceResult, TokenLogprobs

# Measured with sys.getsizeof on CPython 3.11, objects and what points to them.
_ENTRY_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES, _TOP_BYTES = 700, 40, 150, 130


@dataclass(frozen=True)
class CachedAnswer:
    """All that a finished request has to give: its choices, its prompt's log-probabilities if asked for, and notes on
    what it asked for that was ignored."""

    results: tuple[ChoiceResult, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    notes: tuple[str, ...] = ()


class OutputCache:
    """At most `max_bytes` of answers by request, the one used longest ago goes first. For any thread.

    A request has no chance in it when it is greedy, seeded or a beam search, and no function of the user's chooses
    for it. Tenants do not share answers.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._answers: OrderedDict[bytes, tuple[CachedAnswer, int]] = OrderedDict()
        self._bytes = 0
        self._queries = 0
        self._hits = 0
        self._lock = Lock()

    def get(self, request: GenerationRequest) -> CachedAnswer | None:
        """The answer to this very request, prompt and parameters."""
        key = _key(request)
        if key is None:
            return None
        with self._lock:
            self._queries += 1
            entry = self._answers.get(key)
            if entry is None:
                return None
            self._hits += 1
            self._answers.move_to_end(key)
            return entry[0]

    def put(self, request: GenerationRequest, answer: CachedAnswer) -> None:
        """Keep an answer if it is complete: no choice was cancelled."""
        key = _key(request)
        size = _bytes_of(answer)
        if key is None or size > self._max_bytes:
            return
        if any(result.finish_reason not in ("stop", "length") for result in answer.results):
            return
        with self._lock:
            if key in self._answers:
                return
            self._answers[key] = answer, size
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= self._answers.popitem(last=False)[1][1]

    def stats(self) -> CacheStats:
        """The size of the cache and its numbers of hits and queries."""
        with self._lock:
            return CacheStats(len(self._answers), self._bytes, self._max_bytes, self._queries, self._hits)


def _key(request: GenerationRequest) -> bytes | None:
    params = request.params
    if (params.temperature != 0 and params.seed is None) or params.logits_processors:
        return None
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    values["logit_bias"] = sorted(params.logit_bias.items())
    adapter = None if request.adapter is None else request.adapter.digest
    return sha256(repr((request.tenant, adapter, request.prompt_token_ids, sorted(values.items()))).encode()).digest()


def _bytes_of(answer: CachedAnswer) -> int:
    logprobs = [logprob for result in answer.results for logprob in result.logprobs or ()]
    logprobs += [logprob for logprob in answer.prompt_logprobs or () if logprob is not None]
    return (
        _ENTRY_BYTES * (1 + len(answer.results))
        + _TOKEN_BYTES * sum(len(result.token_ids) for result in answer.results)
        + sum(4 * len(result.text or "") for result in answer.results)
        + sum(result.row.nbytes for result in answer.results if result.row is not None)
        + sum(_LOGPROB_BYTES + _TOP_BYTES * len(logprob.top) for logprob in logprobs)
    )
