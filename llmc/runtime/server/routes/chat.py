"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmc.runtime.generation_request import GenerationRequest
from llmc.runtime.grammar import Grammar
from llmc.runtime.server.api_key import tenant_of
from llmc.runtime.server.chat_deltas import (
    AutoToolDeltas,
    ChatDeltas,
    ContentDeltas,
    NamedToolDeltas,
    RequiredToolDeltas,
)
from llmc.runtime.server.chat_reply import ChatReply
from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.outputs import Event, EventStream, answer, outputs_of
from llmc.runtime.server.sampling import grammar_of, json_schema, priority_of, sampling_params
from llmc.runtime.server.schemas.chat import ChatRequest, Message, NamedTool, Tool
from llmc.runtime.server.served_model import ServedModel, check_text
from llmc.runtime.server.tool_calls import ToolCallReader, required_schema

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


def chat_routes(model: ServedModel) -> APIRouter:
    """The route, for that model."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        model.check_name(body.model)
        model.check_room()
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options is only for stream=true", "stream_options")
        plan = tool_plan(model, body)
        prompt = await chat_prompt(
            model,
            body.messages,
            body.tools if plan.shows_tools else None,
            template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            extra=template_variables(body),
        )
        ids = await model.tokenize(prompt, body.add_special_tokens)
        identity = f"chatcmpl-{uuid.uuid4().hex}"
        asked = generation_request(model, body, ids, plan, identity, tenant_of(request, body.cache_salt))
        reply = ChatReply(model, body, identity, plan.reader, (body.messages[-1].text() or "") if body.echo else "")
        if body.stream:
            return EventStream(chunks(model, body, reply, asked))
        return await answer(request, whole(model, reply, asked))

    return router


@dataclass(frozen=True)
class ToolPlan:
    """What tool_choice means for a request.

    grammar: what the output is held to, None for nothing. reader: makes the deltas of a choice. shows_tools: whether
    the template is told of the tools. keeps_special: calls may be marked by special tokens, which are to be seen.
    """

    grammar: Grammar | None
    reader: Callable[[], ChatDeltas]
    shows_tools: bool
    keeps_special: bool = False


def tool_plan(model: ServedModel, body: ChatRequest) -> ToolPlan:
    """Read tools, tool_choice and response_format; 400 where they contradict each other."""
    tools = body.tools or []
    choice = body.tool_choice if body.tool_choice is not None else ("auto" if tools else "none")
    functions = {tool.function.name: tool.function.parameters or ANY_ARGUMENTS for tool in tools}
    if choice == "none":
        return ToolPlan(grammar_of(body), ContentDeltas, shows_tools=False)
    if not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if len(functions) < len(tools):
        raise bad_request("two tools have the same name", "tools")
    if choice == "auto":
        names, single = frozenset(functions), body.parallel_tool_calls is False
        marked = any(model.texts.is_special(opening) for opening in model.tool_form.openings)
        ends = tuple(model.texts.text(token) for token in model.engine.engine.info.eos_token_ids) if marked else ()
        return ToolPlan(
            grammar_of(body),
            lambda: AutoToolDeltas(ToolCallReader(model.tool_form, names), single, ends),
            shows_tools=True,
            keeps_special=marked,
        )
    if grammar_of(body) is not None:
        raise bad_request("a forced tool call cannot be combined with another constraint", "tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in functions:
            raise bad_request(f"tool_choice names {name!r:.80}, which is not among the tools", "tool_choice")
        return ToolPlan(json_schema(functions[name], "tools"), lambda: NamedToolDeltas(name), shows_tools=True)
    most = 1 if body.parallel_tool_calls is False else None
    return ToolPlan(json_schema(required_schema(functions, most), "tools"), RequiredToolDeltas, shows_tools=True)


async def chat_prompt(
    model: ServedModel,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    template: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    extra: dict[str, Any],
) -> str:
    """The prompt that the template makes of messages and tools."""
    return await model.render(
        [template_message(model, message) for message in messages],
        template=template,
        tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        extra=extra,
    )


def template_message(model: ServedModel, message: Message) -> dict[str, Any]:
    """A message as Hugging Face templates expect it: text as one string, arguments of calls as objects."""
    text = message.text()
    if text is not None:
        check_text(text, "messages")
    role: str = message.role
    if role == "developer" and (model.template is None or "developer" not in model.template.source):
        role = "system"
    found: dict[str, Any] = {"role": role, "content": text}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the arguments of a tool call are not JSON: {error}", "messages") from None


def template_variables(body: ChatRequest) -> dict[str, Any]:
    """The request's own variables of the template."""
    documents = {} if body.documents is None else {"documents": body.documents}
    reasoning = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {**documents, **reasoning, **(body.chat_template_kwargs or {})}


def generation_request(
    model: ServedModel, body: ChatRequest, ids: Sequence[int], plan: ToolPlan, identity: str, tenant: str | None
) -> GenerationRequest:
    """What the engine is asked."""
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if asked == 0:
        raise bad_request("max_tokens is at least 1", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    params = sampling_params(
        body,
        model.defaults,
        max_tokens=model.output_limit(asked, len(ids), "max_tokens"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=plan.grammar,
        skip_special_tokens=False if plan.keeps_special else None,
        seed=model.next_seed(),
    )
    return GenerationRequest(
        prompt_token_ids=tuple(ids),
        params=params,
        request_id=identity,
        priority=priority_of(body),
        deadline_seconds=body.deadline_seconds,
        tenant=tenant,
        streams=bool(body.stream),
    )


async def chunks(
    model: ServedModel, body: ChatRequest, reply: ChatReply, asked: GenerationRequest
) -> AsyncGenerator[Event, None]:
    """The chunks of a streamed answer."""
    async with aclosing(outputs_of(model, [asked])) as outputs:
        async for _, output in outputs:
            for entry in reply.take(output):
                yield reply.chunk(entry)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield reply.usage_chunk()


async def whole(model: ServedModel, reply: ChatReply, asked: GenerationRequest) -> Event:
    """The answer in one piece."""
    async with aclosing(outputs_of(model, [asked])) as outputs:
        async for _, output in outputs:
            reply.take(output)
    return reply.whole()
