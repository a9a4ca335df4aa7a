"""A draft model: a second, smaller engine that goes on writing each request, in blocks of the same numbers.

All requests share its steps. The first one brings it to where the requests are, which takes more than one after a
prompt that is longer than a step; those that follow read a draft each. Its tokens are drawn as the request draws its
own, from the same noise: where both engines mean the same, they draw the same.
"""

from collections.abc import Sequence

from llmc.program import Limits
from llmc.runtime.executors.executor import Executor
from llmc.runtime.requests.request import SampledRequest
from llmc.runtime.scheduling.block_pool import BlockPool
from llmc.runtime.speculation.acceptance import Probabilities
from llmc.runtime.speculation.draft import Draft
from llmc.runtime.speculation.draft_cache import DraftCache
from llmc.runtime.speculation.draft_step import Reading, draft_step
from llmc.runtime.speculation.draft_tokens import choose_drafts
from llmc.runtime.speculation.drafter import CachingDrafter


class DraftModel(CachingDrafter):
    """executor: with as many blocks as the first engine's. limits: of its steps. says_from_what: whether drafts come
    with what they were drawn from."""

    def __init__(self, executor: Executor, limits: Limits, *, says_from_what: bool = False) -> None:
        self._executor = executor
        self._says_from_what = says_from_what
        self._limits = limits
        self.seats = min(limits.max_sequences, limits.max_batch_tokens, limits.max_logit_rows)
        self._cache = DraftCache((executor,), limits.block_size)

    def watch(self, pool: BlockPool) -> None:
        """Its cache follows the pool's blocks."""
        pool.watch(self._cache)

    def close(self) -> None:
        """Free the engine."""
        self._executor.close()

    def forget(self, request: SampledRequest) -> None:
        """What it has read may serve others."""
        self._cache.forget(request)

    def write(self, asked: Sequence[tuple[SampledRequest, int]]) -> list[Draft]:
        """So many drafts for each of at most `seats` requests; none for one that it has not read yet."""
        drafts: list[list[int]] = [[] for _ in asked]
        origins: list[list[Probabilities | None]] = [[] for _ in asked]
        going, readings = self._catch_up([request for request, _ in asked])
        while readings:
            step = draft_step(readings, self._limits.block_size, max(1, len(going)))
            rows = [(asked[index][0].sampler, drafts[index]) for index in going]
            tokens, drawn_from = choose_drafts(self._executor, step, rows, says_from_what=self._says_from_what)
            for index, token, origin in zip(going, tokens, drawn_from, strict=True):
                drafts[index].append(token)
                origins[index].append(origin)
            going = [index for index in going if len(drafts[index]) < asked[index][1]]
            readings = [self._reading(asked[index][0], drafts[index]) for index in going]
        return [
            Draft(tokens, probabilities=origin if self._says_from_what else None)
            for tokens, origin in zip(drafts, origins, strict=True)
        ]

    def _catch_up(self, requests: Sequence[SampledRequest]) -> tuple[list[int], list[Reading]]:
        """What one step can read of the requests' tokens, the shortest readings first; and of which that is the rest,
        in the same order."""
        starts = [min(len(r.tokens) - 1, self._cache.known(r, r.tokens)) for r in requests]
        room, readings, ready = self._limits.max_batch_tokens, [], []
        for index in sorted(range(len(requests)), key=lambda index: len(requests[index].tokens) - starts[index]):
            request, start = requests[index], starts[index]
            tokens = request.tokens[start : start + room]
            if not tokens:
                break
            room -= len(tokens)
            readings.append(self._noted(request, start, tokens))
            if start + len(tokens) == len(request.tokens):
                ready.append(index)
        return ready, readings

    def _reading(self, request: SampledRequest, drafts: Sequence[int]) -> Reading:
        return self._noted(request, len(request.tokens) + len(drafts) - 1, drafts[-1:])

    def _noted(self, request: SampledRequest, start: int, tokens: Sequence[int]) -> Reading:
        self._cache.note(request, start, tokens)
        return Reading(request.standing.blocks, start, tokens)
