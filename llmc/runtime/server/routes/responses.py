"""POST /v1/responses, and GET and DELETE of those that are stored."""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from llmc.errors import RequestError
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.server.answer_plan import answer_plan
from llmc.runtime.server.api_key import tenant_of
from llmc.runtime.server.chat_generation import generation_request
from llmc.runtime.server.chat_prompt import template_warnings
from llmc.runtime.server.errors import ApiError, bad_request, of_llmc_error
from llmc.runtime.server.outputs import Event, answer, outputs_of
from llmc.runtime.server.responses.conversation import (
    chat_request,
    input_items,
    messages_of,
    output_items,
    warnings_of_parts,
)
from llmc.runtime.server.responses.event_stream import TypedEventStream
from llmc.runtime.server.responses.fitted_prompt import fitted_prompt
from llmc.runtime.server.responses.reply import ResponseReply
from llmc.runtime.server.responses.store import StoredResponse
from llmc.runtime.server.schemas.field_notes import warnings_of
from llmc.runtime.server.schemas.response_items import InputItem
from llmc.runtime.server.schemas.responses import ResponsesRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.tool_plan import tool_plan
from llmc.runtime.server.unknown_fields import ignored_of


def response_routes(model: ServedModel) -> APIRouter:
    router = APIRouter(route_class=model.route_class)

    @router.post("/v1/responses", response_model=None)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        model.check_name(body.model)
        model.check_generates()
        model.check_room()
        check_supported(model, body)
        pending = await asked_response(model, body, request)
        if body.stream:
            return TypedEventStream(events(model, pending), pending.reply.fail)
        return await answer(request, whole(model, pending))

    @router.get("/v1/responses/{response_id}", response_model=None)
    async def retrieve(response_id: str, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() == "true":
            raise bad_request("a stored response is given whole: leave out stream=true", "stream")
        return JSONResponse(stored_response(model, response_id, request).response)

    @router.get("/v1/responses/{response_id}/input_items", response_model=None)
    async def items(response_id: str, request: Request) -> Response:
        stored = stored_response(model, response_id, request)
        listed = [item_json(response_id, i, item) for i, item in enumerate(stored.input_items)]
        if request.query_params.get("order", "desc") != "asc":
            listed.reverse()
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
        return JSONResponse({"object": "list", "data": listed, "has_more": False, **ends})

    @router.delete("/v1/responses/{response_id}", response_model=None)
    async def delete(response_id: str, request: Request) -> Response:
        stored_response(model, response_id, request)
        model.responses.delete(response_id, tenant_of(request, None))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel(response_id: str, request: Request) -> Response:
        stored_response(model, response_id, request)
        raise bad_request("only background responses can be cancelled, and this server has none", "response_id")

    return router


@dataclass(frozen=True)
class AskedResponse:
    """A request on its way. added: its input; before: the conversation that it continues with."""

    reply: ResponseReply
    request: GenerationRequest
    added: tuple[InputItem, ...]
    before: tuple[InputItem, ...]
    tenant: str | None


def check_supported(model: ServedModel, body: ResponsesRequest) -> None:
    """400 for features of OpenAI's API that this server does not support."""
    check_text_of(body)
    if body.background:
        raise bad_request(
            "background=true is not supported: ask with stream=true, or wait for the answer", "background"
        )
    if body.previous_response_id is not None and not model.responses.keeps:
        raise bad_request(
            "this server keeps no responses (--response-store-bytes 0): send the whole conversation as input",
            "previous_response_id",
        )


def check_text_of(body: ResponsesRequest) -> None:
    """Raise ApiError 400 for text that cannot be encoded, because the response repeats parts of the request."""
    try:
        json.dumps(body.model_dump(), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise bad_request("the text has half of a surrogate pair, which is not a character", "input") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the request cannot be written as JSON: {error}", "input") from None


async def asked_response(model: ServedModel, body: ResponsesRequest, request: Request) -> AskedResponse:
    """The engine's request. Raises ApiError or RequestError if it cannot be served."""
    tenant = tenant_of(request, None)
    added, before = tuple(input_items(body)), conversation_before(model, body, tenant)
    chat = chat_request(body, messages_of([*before, *added]))
    tools = tool_plan(model, chat)
    shortens = body.truncation == "auto"
    with errors_about_input():
        prompt, ids = await fitted_prompt(model, chat, shows_tools=tools.shows_tools, shortens=shortens)
    plan = answer_plan(model, chat, tools, prompt.text)
    identity = model.responses.new_id()
    salted = tenant_of(request, body.cache_salt)
    generation = generation_request(model, chat, ids, plan, identity, salted, limit_field="max_output_tokens")
    warnings = [
        *warnings_of(body, "store"),
        *warnings_of_parts(body),
        *tools.warnings,
        *template_warnings(model, chat),
        *prompt.warnings,
        *ignored_of(request),
    ]
    if "store" in body.model_fields_set and body.store and not model.responses.keeps:
        warnings.append("store is ignored: this server keeps no responses (--response-store-bytes 0)")
    return AskedResponse(ResponseReply(model, body, chat, plan, identity, warnings), generation, added, before, tenant)


@contextmanager
def errors_about_input() -> Iterator[None]:
    """Report errors about messages as errors about the input from which they were made."""
    try:
        yield
    except (ApiError, RequestError) as error:
        api_error = error if isinstance(error, ApiError) else of_llmc_error(error)
        api_error.param = "input" if api_error.param == "messages" else api_error.param
        raise api_error from None


def conversation_before(model: ServedModel, body: ResponsesRequest, tenant: str | None) -> tuple[InputItem, ...]:
    """The items of previous_response_id and of all before it."""
    if body.previous_response_id is None:
        return ()
    stored = model.responses.get(body.previous_response_id, tenant)
    if stored is None:
        raise ApiError(
            400,
            f"there is no response {body.previous_response_id!r:.100} here (any more)",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored.conversation


def stored_response(model: ServedModel, identity: str, request: Request) -> StoredResponse:
    """Return the stored response with this identity. Raises ApiError 404 if the request's tenant has none, or if it was
    removed."""
    stored = model.responses.get(identity, tenant_of(request, None))
    if stored is None:
        raise ApiError(404, f"there is no response {identity!r:.100} here (any more)", param="response_id")
    return stored


def item_json(response_id: str, index: int, item: InputItem) -> dict[str, Any]:
    """An input item with an id, which those that the client wrote lack."""
    fields = item.model_dump()
    if fields["type"] == "message" and isinstance(fields["content"], str):
        fields["content"] = [{"type": "input_text", "text": fields["content"]}]
    return {"id": f"item_{response_id.removeprefix('resp_')}_{index}", "status": "completed", **fields}


def keep(model: ServedModel, asked: AskedResponse) -> None:
    """Store a response that has ended, if its request does not say otherwise."""
    if not asked.reply.is_kept:
        return
    response = asked.reply.response(asked.reply.status)
    conversation = (*asked.before, *asked.added, *output_items(response["output"]))
    size = sum(len(item.model_dump_json()) for item in (*conversation, *asked.added)) + len(str(response))
    model.responses.put(StoredResponse(response, asked.added, conversation, size, asked.tenant))


async def events(model: ServedModel, asked: AskedResponse) -> AsyncGenerator[Event, None]:
    reply, begun = asked.reply, False
    async with aclosing(outputs_of(model, [asked.request])) as outputs:
        async for _, output in outputs:
            if not begun:
                begun = True
                reply.warnings += output.notes
                for event in reply.begin():
                    yield event
            for event in reply.take(output):
                yield event
    last = list(reply.end())
    # Before the client sees the end, because it may continue from this response at once.
    keep(model, asked)
    for event in last:
        yield event


async def whole(model: ServedModel, asked: AskedResponse) -> Event:
    async with aclosing(events(model, asked)) as stream:
        async for _ in stream:
            pass
    return asked.reply.response(asked.reply.status)
