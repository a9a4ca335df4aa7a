"""Answers of /v1/chat/completions: messages with content or tool calls, whole or as chunks of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmc.runtime.requests.request_output import ChoiceDelta, RequestOutput, TokenLogprobs, Usage
from llmc.runtime.server.answer_plan import AnswerPlan
from llmc.runtime.server.chat_deltas import ChatDeltas, ending_of, joined_message
from llmc.runtime.server.reply import Json, Reply
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.token_logprobs import logprob_json, prompt_logprobs_json


@dataclass
class _Choice:
    """The current state of a choice."""

    reader: ChatDeltas
    deltas: list[Json] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    begun: bool = False


class ChatReply(Reply[ChatRequest]):
    """The reply to a chat request. plan: how outputs are read. prompt: the template's text."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

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
        super().__init__(model, body, identity, warnings)
        self._echoed = (body.messages[-1].text() or "") if body.echo else ""
        if body.return_prompt_text:
            self._notes["prompt_text"] = prompt
        self._choices = [_Choice(plan.reader()) for _ in range(body.n or 1)]
        self._thinking = plan.thinking
        self._counts = Usage(0, 0, 0)
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def take(self, index: int, output: RequestOutput) -> list[list[Json]]:
        """A chunk is about one choice."""
        self._counts = output.usage
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        return [[entry] for delta in output.choices for entry in self._entries(delta)]

    def whole(self) -> Json:
        answer = self.framed([self._whole_choice(i, choice) for i, choice in enumerate(self._choices)])
        if self._body.prompt_logprobs is not None and self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_json(self._model.texts, self._prompt_logprobs)
        return answer

    def counts(self) -> Usage:
        return self._counts

    def usage(self) -> Json:
        """Return the usage, with the tokens of thinking for a model that thinks."""
        if self._thinking is None:
            return super().usage()
        thought = sum(self._thinking.tokens(c.tokens, self._model.texts.utf8) for c in self._choices)
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": thought}}

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
        parts = choice.reader.feed(delta.text, ending_of(delta))
        if not choice.begun:
            parts.insert(0, {"role": "assistant", "content": self._echoed})
            choice.begun = True
        choice.deltas += parts
        logprobs = [
            logprob_json(self._model.texts, entry, self._body.top_logprobs or 0, self._text)
            for entry in delta.logprobs or ()
        ]
        choice.logprobs += logprobs
        choice.tokens += delta.token_ids
        choice.stop_reason = delta.stop_reason
        if reason is not None:
            choice.finish_reason = choice.reader.finish_reason(reason)
        if not parts and (reason is not None or logprobs):
            parts = [{}]
        entries: list[Json] = [
            {"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts
        ]
        if entries:
            if self._body.logprobs and logprobs:
                entries[-1]["logprobs"] = {"content": logprobs, "refusal": None}
            entries[-1]["finish_reason"] = choice.finish_reason
            if self._body.return_token_ids:
                entries[-1]["token_ids"] = list(delta.token_ids)
        return entries
