"""A draft model: a second, smaller engine that continues each request, in blocks of the same numbers.

All requests share its steps. The first step reads the tokens that it has not read yet, which takes several steps for
prompts that are longer than a step. Each further step reads one draft. Its tokens are drawn as the request draws its
own, with the same noise: if both engines have similar logits, they draw the same token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmc.errors import RequestError
from llmc.program import Limits
from llmc.runtime.executors.executor import Executor
from llmc.runtime.requests.boundary import attempts
from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.speculation.acceptance import Probabilities
from llmc.runtime.speculation.draft import Draft
from llmc.runtime.speculation.draft_cache import DraftCache
from llmc.runtime.speculation.draft_step import Reading, draft_step
from llmc.runtime.speculation.draft_tokens import Drawn, choose_drafts
from llmc.runtime.speculation.drafter import CachingDrafter


@dataclass(eq=False, slots=True)
class _Writing:
    """A request for `most` drafts, and the drafts until now. error: the reason if there will be none."""

    request: SampledRequest
    most: int
    drafts: list[int] = field(default_factory=list)
    origins: list[Probabilities | None] = field(default_factory=list)
    error: RequestError | None = None

    def take(self, drawn: Drawn | RequestError) -> None:
        """Take the next draft, or the error that prevents it."""
        if isinstance(drawn, RequestError):
            self.error = drawn
        else:
            self.drafts.append(drawn.token)
            self.origins.append(drawn.origin)

    @property
    def goes_on(self) -> bool:
        """Whether it needs another draft."""
        return self.error is None and len(self.drafts) < self.most


class DraftModel(CachingDrafter):
    """Drafts with a second, smaller engine. executor: has the same number of blocks as the first engine's. limits:
    limits of its steps. says_from_what: whether drafts come with their distributions."""

    def __init__(self, executor: Executor, limits: Limits, *, says_from_what: bool = False) -> None:
        self._executor = executor
        self._says_from_what = says_from_what
        self._limits = limits
        self.seats = min(limits.max_sequences, limits.max_batch_tokens, limits.max_logit_rows)
        self._cache = DraftCache((executor,), limits.block_size)

    def watch(self, pool: BlockPool) -> None:
        """Follow the pool's blocks with its cache."""
        pool.watch(self._cache)

    def close(self) -> None:
        """Free the engine."""
        self._executor.close()

    def forget(self, request: SampledRequest) -> None:
        """Drop the request; its cached rows may serve other requests."""
        self._cache.forget(request)

    def write(self, asked: Sequence[tuple[SampledRequest, int]]) -> Sequence[Draft | RequestError]:
        """The requested number of drafts for each of at most `seats` requests; none for a request that it has not read
        yet."""
        writing = [_Writing(request, most) for request, most in asked]
        going, readings = self._catch_up(writing)
        while readings:
            step = draft_step(readings, self._limits.block_size, max(1, len(going)))
            guesses = [(writer.request.sampler, writer.drafts) for writer in going]
            for current, drawn in zip(
                going, choose_drafts(self._executor, step, guesses, says_from_what=self._says_from_what), strict=True
            ):
                current.take(drawn)
            advanced = self._read([(writer, _last(writer)) for writer in going if writer.goes_on])
            going, readings = [writer for writer, _ in advanced], [reading for _, reading in advanced]
        return [self._draft(writer) if writer.error is None else writer.error for writer in writing]

    def _draft(self, written: _Writing) -> Draft:
        return Draft(written.drafts, probabilities=written.origins if self._says_from_what else None)

    def _catch_up(self, writing: Sequence[_Writing]) -> tuple[list[_Writing], list[Reading]]:
        """The tokens that one step can read, the shortest readings first; and the requests whose reading is then
        complete, in the same order."""
        unread = attempts(self._unread, [(writer,) for writer in writing])
        room, parts = self._limits.max_batch_tokens, []
        behind: list[tuple[_Writing, _Part]] = []
        for current, part in zip(writing, unread, strict=True):
            if isinstance(part, RequestError):
                current.error = part
            else:
                behind.append((current, part))
        for current, part in sorted(behind, key=lambda pair: len(pair[1].tokens)):
            tokens = part.tokens[:room]
            if not tokens:
                break
            room -= len(tokens)
            parts.append((current, part._replace(tokens=tokens)))
        read = self._read(parts)
        ready = [
            writer for writer, reading in read if reading.start + len(reading.tokens) == len(writer.request.tokens)
        ]
        return ready, [reading for _, reading in read]

    def _unread(self, writing: _Writing) -> "_Part":
        """The tokens of a request that the draft model has not read: at least its last token."""
        tokens = writing.request.tokens
        start = min(len(tokens) - 1, self._cache.known(writing.request, tokens))
        return _Part(start, tokens[start:])

    def _read(self, parts: Sequence[tuple[_Writing, "_Part"]]) -> list[tuple[_Writing, Reading]]:
        """Read these parts, which are then in the cache, except those of requests that fail."""
        answered = []
        for (writer, _), reading in zip(parts, attempts(self._noted, parts), strict=True):
            if isinstance(reading, RequestError):
                writer.error = reading
            else:
                answered.append((writer, reading))
        return answered

    def _noted(self, writing: _Writing, part: "_Part") -> Reading:
        self._cache.note(writing.request, part.start, part.tokens)
        return Reading(writing.request.standing.blocks, part.start, part.tokens)


class _Part(NamedTuple):
    """Tokens of a request, or of its draft, from position `start` on."""

    start: int
    tokens: list[int]


def _last(writing: _Writing) -> _Part:
    """The last draft of a request."""
    return _Part(len(writing.request.tokens) + len(writing.drafts) - 1, writing.drafts[-1:])
