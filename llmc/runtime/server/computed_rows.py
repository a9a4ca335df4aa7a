"""The rows that the engine gives for the texts of one HTTP request, and the frame of the answers."""

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from llmc.runtime.requests.generation_request import GenerationRequest, Priority
from llmc.runtime.requests.request_output import RequestOutput, Row
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.server.api_key import tenant_of
from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.outputs import outputs_of
from llmc.runtime.server.prompt_truncation import CUT_IT, readable_part
from llmc.runtime.server.schemas.embeddings import RowFields
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.tokenizing import Encode, check_text, too_long
from llmc.runtime.server.unknown_fields import ignored_of
from llmc.runtime.text.prompts import check_ids

Json = dict[str, Any]
_PARAMS = SamplingParams()


@dataclass(frozen=True)
class ComputedRows:
    """The rows in the order of the texts, and the total number of tokens."""

    rows: tuple[Row, ...]
    tokens: int


async def read_texts(model: ServedModel, fields: RowFields, texts: Sequence[str], encode: Encode) -> list[list[int]]:
    """Token ids of each text, truncated as requested. Text far beyond the limit is not tokenized."""
    readable = [readable_text(model, fields, text) for text in texts]
    return [cut(model, fields, ids) for ids in await model.tokenizing.of_all(readable, encode)]


def readable_text(model: ServedModel, fields: RowFields, text: str) -> str:
    """The readable part of a text: the maximum number of characters that fit into the tokens of a whole text. Raises
    ContextLengthError for a longer text if the request does not allow truncation."""
    if fields.truncate_prompt_tokens is None:
        model.tokenizing.check(text, model.max_model_len, "input", CUT_IT)
        return text
    check_text(text, "input")
    return readable_part(model, fields, text)


def cut(model: ServedModel, fields: RowFields, ids: list[int]) -> list[int]:
    """The tokens that are read. Raises ContextLengthError for texts longer than the engine accepts, unless the request
    sets how to truncate them."""
    limit = fields.truncate_prompt_tokens
    if limit is None and len(ids) > model.max_model_len:
        raise too_long(f"{len(ids)} tokens", model.max_model_len, "input", CUT_IT)
    if limit == 0:
        raise bad_request("truncate_prompt_tokens is -1 or at least 1", "truncate_prompt_tokens")
    most = model.max_model_len if limit is None or limit < 0 else min(limit, model.max_model_len)
    return model.engine.engine.tokenizer.cut(ids, most, keeps_start=fields.truncation_side == "right")


async def rows_of(
    model: ServedModel, fields: RowFields, request: Request, texts: Sequence[Sequence[int]]
) -> ComputedRows:
    """The engine's rows for each text. Texts of one request share steps with all others."""
    identity, tenant = uuid.uuid4().hex, tenant_of(request, fields.cache_salt)
    priority = Priority.PREMIUM if fields.priority < 0 else Priority.FREE
    requests = [
        GenerationRequest(
            prompt_token_ids=tuple(ids),
            params=_PARAMS,
            request_id=f"row-{identity}-{index}",
            priority=priority,
            deadline_seconds=fields.deadline_seconds,
            tenant=tenant,
            streams=False,
            adapter=model.adapter(fields.model),
            wants_row=True,
        )
        for index, ids in enumerate(texts)
    ]
    outputs_by_text: dict[int, RequestOutput] = {}
    async with aclosing(outputs_of(model, requests)) as outputs:
        async for index, output in outputs:
            outputs_by_text[index] = output
    rows = [outputs_by_text[index].choices[0].row for index in range(len(requests))]
    if any(row is None for row in rows):
        raise bad_request("the deadline has passed before all texts were read", "deadline_seconds")
    return ComputedRows(tuple(row for row in rows if row is not None), sum(map(len, texts)))


async def input_ids(
    model: ServedModel, fields: RowFields, given: Any, prepare: Callable[[Any], Any] = lambda text: text
) -> list[list[int]]:
    """Token ids of each text of an `input`: a text, several, token ids, or several lists of them. prepare: a text, as
    the model reads it."""
    texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if isinstance(texts[0], str):
        encode = partial(model.engine.engine.tokenizer.encode, add_special_tokens=fields.add_special_tokens)
        return await read_texts(model, fields, [prepare(text) for text in texts], encode)
    for ids in texts:
        check_ids("input", ids, model.vocab_size)
    return [cut(model, fields, ids) for ids in texts]


def framed(
    model: ServedModel, fields: RowFields, request: Request, kind: str, computed: ComputedRows, **content: Any
) -> Json:
    """An answer with the common fields; tokens are counted as in OpenAI's embeddings. kind: the prefix of its id."""
    warnings = ignored_of(request)
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": fields.model or model.name,
        **content,
        "usage": {"prompt_tokens": computed.tokens, "total_tokens": computed.tokens},
        **({"warnings": warnings} if warnings else {}),
    }
