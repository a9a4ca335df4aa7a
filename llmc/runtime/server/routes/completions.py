"""POST /v1/completions."""

import asyncio
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.server.api_key import tenant_of
from llmc.runtime.server.completion_reply import CompletionReply, EchoedPrompt
from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.prompt_truncation import read_text, truncated
from llmc.runtime.server.sampling import engine_request, grammar_of, sampling_params
from llmc.runtime.server.schemas.completion import MAX_SEQUENCES, CompletionRequest
from llmc.runtime.server.schemas.field_notes import warnings_of
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.unknown_fields import ignored_of
from llmc.runtime.text.prompts import check_ids

DEFAULT_MAX_TOKENS = 16


def completion_routes(model: ServedModel) -> APIRouter:
    router = APIRouter(route_class=model.route_class)

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        model.check_name(body.model)
        check_supported(body)
        model.check_generates()
        model.check_room()
        identity = f"cmpl-{uuid.uuid4().hex}"
        prompts: list[EchoedPrompt] = []
        requests: list[GenerationRequest] = []
        for i, text in enumerate(body.prompts()):
            # Many prompts are read one by one, with other requests in between.
            await asyncio.sleep(0)
            prompts.append(await read_prompt(model, body, text))
            tenant = tenant_of(request, body.cache_salt)
            requests.append(generation_request(model, body, prompts[-1], f"{identity}-{i}", tenant))
        warnings = [*warnings_of(body), *ignored_of(request)]
        reply = CompletionReply(model, body, identity, prompts, warnings, drops_output=body.max_tokens == 0)
        return await reply.response(request, requests)

    return router


def check_supported(body: CompletionRequest) -> None:
    """400 for features of OpenAI's API that this server does not support."""
    if body.suffix:
        raise bad_request("suffix (text after the completion) is not supported", "suffix")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only for stream=true", "stream_options")
    if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
        raise bad_request("max_tokens=0 gives nothing without echo or prompt_logprobs", "max_tokens")
    if body.stream and (body.best_of or 1) > (body.n or 1):
        raise bad_request("best_of cannot be streamed: the best are known at the end", "best_of")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise bad_request(f"best_of={body.best_of} is less than n={body.n}", "best_of")
    if body.sequences() > MAX_SEQUENCES:
        raise bad_request(
            f"prompts times n (or best_of) makes {body.sequences()} outputs, and a request may have at most "
            f"{MAX_SEQUENCES}: send several requests",
            "prompt",
        )


async def read_prompt(model: ServedModel, body: CompletionRequest, prompt: str | list[int]) -> EchoedPrompt:
    """Token ids of a prompt, and its text if that is requested."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if isinstance(prompt, str):
        read = await read_text(model, prompt, body, max_tokens)
        return EchoedPrompt(read.ids, prompt if read.is_whole or not body.echo else model.detokenize(read.ids))
    check_ids("prompt", prompt, model.vocab_size)
    ids = truncated(model, prompt, body, max_tokens)
    return EchoedPrompt(ids, model.detokenize(ids) if body.echo else "")


def generation_request(
    model: ServedModel, body: CompletionRequest, prompt: EchoedPrompt, identity: str, tenant: str | None
) -> GenerationRequest:
    """The engine's request for one prompt."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    limit = model.output_limit(max_tokens, len(prompt.ids), "max_tokens")
    wants_prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        wants_prompt = max(body.logprobs, wants_prompt or 0)
    params = sampling_params(
        body,
        model.defaults,
        # The engine makes at least one token, which the reply leaves out.
        max_tokens=max(1, min(limit, model.max_model_len - len(prompt.ids))),
        logprobs=body.logprobs,
        prompt_logprobs=wants_prompt,
        best_of=body.best_of,
        grammar=grammar_of(body),
        seed=model.next_seed(),
    )
    return engine_request(body, prompt.ids, params, identity, tenant, model.adapter(body.model))
