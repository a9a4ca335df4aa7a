"""POST /tokenize and POST /detokenize."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from llmc.runtime.server.chat_prompt import chat_prompt
from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.prompt_truncation import MOST_CONTEXTS
from llmc.runtime.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.unknown_fields import ignored_of


def token_routes(model: ServedModel) -> APIRouter:
    router = APIRouter(route_class=model.route_class)

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        model.check_name(body.model)
        ids = await token_ids(model, body)
        answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        texts = [model.texts.text(token) for token in ids] if body.return_token_strs else None
        return _answer(request, {**answer, "token_strs": texts}, body.left_out)

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        model.check_name(body.model)
        return _answer(request, {"prompt": model.detokenize(body.tokens)}, ())

    return router


def _answer(request: Request, content: dict[str, Any], left_out: Sequence[str]) -> Response:
    warnings = [*left_out, *ignored_of(request)]
    return JSONResponse({**content, "warnings": warnings} if warnings else content)


async def token_ids(model: ServedModel, body: TokenizeRequest) -> list[int]:
    """The tokens of a prompt or of messages; a prompt gets special tokens unless told otherwise, messages do not."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return await model.tokenize(
            body.prompt, body.add_special_tokens is not False, MOST_CONTEXTS * model.max_model_len
        )
    prompt = await chat_prompt(model, body, body.messages or [])
    return await model.tokenize(prompt.text, bool(body.add_special_tokens))
