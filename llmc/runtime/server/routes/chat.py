"""POST /v1/chat/completions."""

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmc.runtime.server.answer_plan import answer_plan
from llmc.runtime.server.api_key import tenant_of
from llmc.runtime.server.chat_generation import asked_tokens, generation_request
from llmc.runtime.server.chat_prompt import chat_prompt, template_warnings
from llmc.runtime.server.chat_reply import ChatReply
from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.prompt_truncation import read_text
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.schemas.field_notes import warnings_of
from llmc.runtime.server.schemas.fields import unknown_in
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.tool_plan import tool_plan
from llmc.runtime.server.unknown_fields import ignored_of


def chat_routes(model: ServedModel) -> APIRouter:
    router = APIRouter(route_class=model.route_class)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        model.check_name(body.model)
        model.check_generates()
        model.check_room()
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options is only for stream=true", "stream_options")
        tools = tool_plan(model, body)
        prompt = await chat_prompt(model, body, body.messages, shows_tools=tools.shows_tools)
        ids, _ = await read_text(model, prompt.text, body, asked_tokens(body))
        plan = answer_plan(model, body, tools, prompt.text)
        identity = f"chatcmpl-{uuid.uuid4().hex}"
        generation = generation_request(model, body, ids, plan, identity, tenant_of(request, body.cache_salt))
        warnings = [
            *warnings_of(body),
            *body.left_out,
            *unknown_in("tools", body.tools),
            *tools.warnings,
            *template_warnings(model, body),
            *prompt.warnings,
            *ignored_of(request),
        ]
        reply = ChatReply(model, body, identity, plan, prompt=prompt.text, warnings=warnings)
        return await reply.response(request, [generation])

    return router
