"""The request that the arguments of `AsyncEngine.generate` describe, and its grammar."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from functools import partial
from typing import cast
from uuid import uuid4

from llmc.errors import RequestError
from llmc.runtime.engine import Engine
from llmc.runtime.grammar.compiler import CompiledGrammar
from llmc.runtime.requests.generation_request import GenerationRequest, Priority
from llmc.runtime.sampling.sampling_keywords import SamplingKeywords, chosen_params
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.text.conversation import Conversation, is_conversation
from llmc.runtime.text.prompts import Prompt
from llmc.runtime.text.prompts import token_ids as ids_of


async def described_request(
    engine: Engine,
    prompt: GenerationRequest | Prompt | Conversation,
    params: SamplingParams | None,
    sampling: SamplingKeywords,
    request_id: str | None,
    priority: Priority,
    deadline_seconds: float | None,
    tenant: str | None,
    streams: bool,
    adapter: str | None,
) -> GenerationRequest:
    """Return the request for `AsyncEngine.generate`, tokenizing its prompt in another thread.

    Args:
        engine: The engine whose tokenizer, chat template and adapters the request uses.
        prompt: As in `AsyncEngine.generate`, and so are all other arguments.

    Raises:
        RequestError: If sampling parameters come with a GenerationRequest.
    """
    if not isinstance(prompt, GenerationRequest):
        return GenerationRequest(
            prompt_token_ids=await asyncio.to_thread(_token_ids, engine, prompt),
            params=chosen_params(params, sampling),
            request_id=uuid4().hex if request_id is None else request_id,
            priority=priority,
            deadline_seconds=deadline_seconds,
            tenant=tenant,
            streams=streams,
            adapter=None if adapter is None else engine.adapters.get(adapter),
        )
    if params is not None or sampling:
        raise RequestError(
            "sampling parameters came with a GenerationRequest, which has its own",
            fix="put them into the request, or pass only the prompt",
        )
    return prompt


async def compiled_grammar(
    engine: Engine, threads: Executor, params: SamplingParams, arrived: float
) -> CompiledGrammar | None:
    """Return the request's grammar, compiled in one of `threads`; None without a grammar."""
    if params.grammar is None:
        return None
    compiled = engine.grammars.compiled(params.grammar)
    if compiled is not None:
        return compiled
    compiling = partial(engine.grammars.compile, params.grammar, arrived)
    return await asyncio.get_running_loop().run_in_executor(threads, compiling)


def _token_ids(engine: Engine, prompt: Prompt | Conversation) -> tuple[int, ...]:
    if is_conversation(prompt):
        return tuple(engine.conversations.token_ids(prompt))
    return tuple(ids_of(cast(Prompt, prompt), engine.tokenizer))
