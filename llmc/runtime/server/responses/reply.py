"""A response as OpenAI's API has it: the object, and the events of a stream around those of its items."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from llmc.runtime.requests.request_output import ChoiceDelta, RequestOutput, Usage
from llmc.runtime.server.answer_plan import AnswerPlan
from llmc.runtime.server.chat_deltas import ending_of
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.responses.output_items import Json, OutputItems
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.schemas.responses import ResponsesRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.token_logprobs import logprob_json

# The engine's reasons to end before the model did, as `incomplete_details` has them.
_INCOMPLETE = {"length": "max_output_tokens"}


class ResponseReply:
    """Takes the engine's outputs and makes events of them, or one response.

    chat: the request in chat's form. plan: how the output is read. warnings: fields that were ignored.
    """

    def __init__(
        self,
        model: ServedModel,
        body: ResponsesRequest,
        chat: ChatRequest,
        plan: AnswerPlan,
        identity: str,
        warnings: Sequence[str],
    ) -> None:
        self._model = model
        self._body = body
        self._chat = chat
        self._thinking = plan.thinking
        self._reader = plan.reader()
        self._identity = identity
        self.warnings = list(warnings)
        self._created = int(time.time())
        self._items = OutputItems()
        self._tokens: list[int] = []
        self._logprobs: list[Json] = []
        self._told_logprobs: int | None = None
        self._usage = Usage(0, 0, 0)
        self._reason: str | None = None
        self._events = 0

    def begin(self) -> Iterator[Json]:
        """The first events."""
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self.response("in_progress")})

    def take(self, output: RequestOutput) -> Iterator[Json]:
        """Note an output, and return its events. All of them are to be taken."""
        self._usage = output.usage
        for delta in output.choices:
            for event in self._of_delta(delta):
                yield self._numbered(event)

    def end(self) -> Iterator[Json]:
        """The last events, after the last output."""
        status = self.status
        for event in self._items.finish(status):
            yield self._numbered(event)
        yield self._numbered({"type": f"response.{status}", "response": self.response(status)})

    def fail(self, error: ApiError) -> Json:
        """The event that ends a stream whose request failed on the way."""
        failure = {"code": "server_error", "message": error.message}
        return self._numbered({"type": "response.failed", "response": {**self.response("failed"), "error": failure}})

    @property
    def status(self) -> str:
        """The status of the whole response, after its last output."""
        return "completed" if self._reason in ("stop", "tool_calls") else "incomplete"

    def response(self, status: str) -> Json:
        body, chat, ended = self._body, self._chat, status != "in_progress"
        incomplete = {"reason": _INCOMPLETE.get(self._reason or "", self._reason)} if status == "incomplete" else None
        defaults = self._model.defaults
        answer: Json = {
            "id": self._identity,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model or self._model.name,
            "output": self._items.items if ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": chat.reasoning_effort, "summary": None},
            "store": self.is_kept,
            "temperature": defaults.temperature if body.temperature is None else body.temperature,
            "text": {"format": self._format()},
            "tool_choice": "auto" if body.tool_choice is None else _dumped(body.tool_choice),
            "tools": [_dumped(tool) for tool in body.tools or ()],
            "top_logprobs": chat.top_logprobs or 0,
            "top_p": defaults.top_p if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage_json() if ended else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
        return {**answer, "warnings": self.warnings} if self.warnings else answer

    @property
    def is_kept(self) -> bool:
        """Whether the response is stored when it has ended."""
        return self._body.store is not False and self._model.responses.keeps

    def _of_delta(self, delta: ChoiceDelta) -> Iterator[Json]:
        reason = delta.finish_reason
        self._tokens += delta.token_ids
        top = self._chat.top_logprobs or 0
        self._logprobs += [logprob_json(self._model.texts, entry, top) for entry in delta.logprobs or ()]
        for part in self._reader.feed(delta.text, ending_of(delta)):
            yield from self._items.add(part, self._new_logprobs() if part.get("content") else [])
        if reason is not None:
            self._reason = self._reader.finish_reason(reason)

    def _new_logprobs(self) -> list[Json]:
        """Log-probabilities of tokens that no event has reported yet, without those of thoughts."""
        if not self._chat.logprobs:
            return []
        if self._told_logprobs is None:
            self._told_logprobs = self._thought_tokens()
        new, self._told_logprobs = self._logprobs[self._told_logprobs :], len(self._logprobs)
        return new

    def _thought_tokens(self) -> int:
        return 0 if self._thinking is None else self._thinking.tokens(self._tokens, self._model.texts.utf8)

    def _usage_json(self) -> Json:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens()},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _format(self) -> Json:
        form = None if self._body.text is None else self._body.text.format
        return {"type": "text"} if form is None else _dumped(form)

    def _numbered(self, event: Json) -> Json:
        self._events += 1
        return {**event, "sequence_number": self._events - 1}


def _dumped(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump(by_alias=True)
