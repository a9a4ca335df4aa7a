"""Answers of /v1/chat/completions: messages with content or tool calls, whole or as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc.runtime.requests.request_output import ChoiceDelta, RequestOutput, TokenLogprobs, Usage
from llmc.runtime.server.answer_plan import AnswerPlan
from llmc.runtime.server.chat_deltas import ChatDeltas, joined_message
from llmc.runtime.server.completion_reply import ranked, usage_json
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.token_logprobs import logprob_json

Json = dict[str, Any]


@dataclass
class _Choice:
    """A choice so far."""

    reader: ChatDeltas
    deltas: list[Json] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    begun: bool = False


class ChatReply:
    """Takes the engine's outputs and makes chunks of them, or one answer. plan: how outputs are read.

    prompt: the template's text. warnings: fields that were ignored, told in the answer or the first chunk.
    """

    def __init__(
        self,
        model: ServedModel,
        body: ChatRequest,
        identity: str,
        plan: AnswerPlan,
        *,
        prompt: str,
        warnings: Sequence[str],
    ) -> None:
        self._model = model
        self._body = body
        self._identity = identity
        self._created = int(time.time())
        self._echoed = (body.messages[-1].text() or "") if body.echo else ""
        self._text = model.texts.id_text if body.return_tokens_as_token_ids else model.texts.text
        self._notes: Json = {"warnings": list(warnings)} if warnings else {}
        if body.return_prompt_text:
            self._notes["prompt_text"] = prompt
        self._choices = [_Choice(plan.reader()) for _ in range(body.n or 1)]
        self._thinking = plan.thinking
        self._usage = Usage(0, 0, 0)
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def take(self, output: RequestOutput) -> list[Json]:
        """Note an output; returns the choices of the chunks that tell of it."""
        self._usage = output.usage
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        return [entry for delta in output.choices for entry in self._entries(delta)]

    def chunk(self, choice: Json) -> Json:
        """A chunk of the stream, about one choice."""
        chunk = {**self._frame("chat.completion.chunk"), "choices": [choice], **self._notes}
        self._notes = {}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = usage_json(self._usage) if options.continuous_usage_stats else None
        return chunk

    def usage_chunk(self) -> Json:
        """The chunk after the last choice's, with token counts."""
        return {**self._frame("chat.completion.chunk"), "choices": [], "usage": self._usage_json()}

    def whole(self) -> Json:
        """The whole answer, after the last output."""
        answer = {
            **self._frame("chat.completion"),
            "choices": [self._whole_choice(i, choice) for i, choice in enumerate(self._choices)],
            "usage": self._usage_json(),
            **self._notes,
        }
        if self._body.prompt_logprobs is not None and self._prompt_logprobs is not None:
            found = self._prompt_logprobs
            answer["prompt_logprobs"] = [None if e is None else ranked(self._model, e) for e in found]
        return answer

    def _usage_json(self) -> Json:
        """Token counts, with those of thinking for a model that does."""
        usage = usage_json(self._usage)
        if self._thinking is None:
            return usage
        thought = sum(self._thinking.tokens(c.tokens, self._model.texts.utf8) for c in self._choices)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": thought}}

    def _whole_choice(self, index: int, choice: _Choice) -> Json:
        entry: Json = {
            "index": index,
            "message": joined_message(choice.deltas),
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return {**entry, "token_ids": choice.tokens} if self._body.return_token_ids else entry

    def _entries(self, delta: ChoiceDelta) -> list[Json]:
        """The choice's entries in chunks: first the role, then what the text adds, the last with the finish reason."""
        choice = self._choices[delta.index]
        reason = delta.finish_reason
        found = choice.reader.feed(delta.text, reason)
        if not choice.begun:
            found.insert(0, {"role": "assistant", "content": self._echoed})
            choice.begun = True
        choice.deltas += found
        logprobs = [
            logprob_json(self._model.texts, entry, self._body.top_logprobs or 0, self._text)
            for entry in delta.logprobs or ()
        ]
        choice.logprobs += logprobs
        choice.tokens += delta.token_ids
        choice.stop_reason = delta.stop_reason
        if reason is not None:
            choice.finish_reason = choice.reader.finish_reason(reason)
        if not found and (reason is not None or logprobs):
            found = [{}]
        entries: list[Json] = [
            {"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None} for part in found
        ]
        if entries:
            if self._body.logprobs and logprobs:
                entries[-1]["logprobs"] = {"content": logprobs, "refusal": None}
            entries[-1]["finish_reason"] = choice.finish_reason
            if self._body.return_token_ids:
                entries[-1]["token_ids"] = list(delta.token_ids)
        return entries

    def _frame(self, kind: str) -> Json:
        name = self._body.model or self._model.name
        return {"id": self._identity, "object": kind, "created": self._created, "model": name}
