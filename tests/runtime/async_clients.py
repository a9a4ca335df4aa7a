"""Clients of the asyncio engine: they ask, and hear all that is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine import Engine
from llmc.runtime.requests.completion import Completion
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.requests.request_output import RequestOutput, TokenLogprobs
from llmc.runtime.sampling.sampling_params import SamplingParams

PROMPTS = [(5, 9, 2) * 7, (11,), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), (8, 8), (40, 41, 42, 43), (77,) * 27]


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[AsyncEngine]:
    """The engine as it serves; by the end it must have nothing in flight."""
    running = AsyncEngine(engine)
    try:
        yield running
        assert running.stats().blocks_used == 0, "every block has come back"
        assert not running.requests()
    finally:
        await asyncio.to_thread(running.close)


def request(name: object, prompt: tuple[int, ...], params: SamplingParams, **more: Any) -> GenerationRequest:
    """more: other fields of the request."""
    base = GenerationRequest(prompt_token_ids=prompt, params=params, request_id=str(name))
    return replace(base, **more)


@dataclass
class Heard:
    """All outputs of a request, joined."""

    outputs: list[RequestOutput]

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    def tokens(self, index: int = 0) -> tuple[int, ...]:
        return sum((c.token_ids for o in self.outputs for c in o.choices if c.index == index), ())

    def text(self, index: int = 0) -> str:
        return "".join(c.text for o in self.outputs for c in o.choices if c.index == index)

    def reason(self, index: int = 0) -> str | None:
        reasons = [c.finish_reason for o in self.outputs for c in o.choices if c.index == index]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1]

    def logprobs(self, index: int = 0) -> tuple[TokenLogprobs, ...]:
        return sum((c.logprobs or () for o in self.outputs for c in o.choices if c.index == index), ())


async def listen(engine: AsyncEngine, asked: GenerationRequest) -> Heard:
    """Ask, and stay until the last output."""
    heard = Heard([output async for output in engine.generate(asked)])
    assert [o.finished for o in heard.outputs] == [False] * (len(heard.outputs) - 1) + [True]
    return heard


def agrees(heard: Heard, wanted: Completion) -> bool:
    """Whether the tokens of every choice are those of the completion."""
    return [heard.tokens(i) for i in range(len(wanted.choices))] == [c.token_ids for c in wanted.choices]
