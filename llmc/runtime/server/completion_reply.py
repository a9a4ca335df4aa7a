"""Answers of /v1/completions: choices with text, echo and log-probabilities, whole or as chunks of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmc.runtime.requests.request_output import ChoiceDelta, RequestOutput, TokenLogprobs, Usage
from llmc.runtime.server.reply import Json, Reply
from llmc.runtime.server.schemas.completion import CompletionRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.text_offsets import OutputOffsets, prompt_offsets
from llmc.runtime.server.token_logprobs import prompt_logprobs_json


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt to come before its output: its ids, and its text as it was sent or else decoded."""

    ids: Sequence[int]
    text: str


@dataclass
class _Choice:
    """The current state of a choice. offsets: those of the output's tokens in its text. prompt: number of characters of
    `text` from the prompt."""

    offsets: OutputOffsets
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt: int = 0
    begun: bool = False


class _Told(NamedTuple):
    """A token sent to the client. offset: its beginning in the text. entry: its log-probability, if known."""

    token: int
    offset: int
    entry: TokenLogprobs | None


class CompletionReply(Reply[CompletionRequest]):
    """The reply to a completion request. prompts: those to be echoed. drops_output: only the prompt is returned
    (max_tokens 0)."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        model: ServedModel,
        body: CompletionRequest,
        identity: str,
        prompts: Sequence[EchoedPrompt],
        warnings: Sequence[str],
        drops_output: bool,
    ) -> None:
        super().__init__(model, body, identity, warnings)
        self._prompts = prompts
        self._drops_output = drops_output
        self._per_prompt = body.n or 1
        self._tokenizer = model.engine.engine.tokenizer
        skips = body.skip_special_tokens
        count = len(prompts) * self._per_prompt
        self._choices = [_Choice(OutputOffsets(self._tokenizer, skip_special_tokens=skips)) for _ in range(count)]
        self._prompt_logprobs: list[tuple[TokenLogprobs | None, ...] | None] = [None] * len(prompts)
        self._usage: list[Usage] = [Usage(0, 0, 0)] * len(prompts)

    def take(self, index: int, output: RequestOutput) -> list[list[Json]]:
        """A chunk is about all choices of a prompt."""
        self._usage[index] = output.usage
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        choices = [self._delta(index, delta) for delta in output.choices]
        return [choices] if choices else []

    def whole(self) -> Json:
        choices = []
        for i, choice in enumerate(self._choices):
            entry = self._entry(i, choice.text, choice.logprobs or None, choice.finish_reason, choice.stop_reason)
            if self._body.prompt_logprobs is not None:
                logprobs = self._prompt_logprobs[i // self._per_prompt]
                entry["prompt_logprobs"] = (
                    None if logprobs is None else prompt_logprobs_json(self._model.texts, logprobs)
                )
            if self._body.return_token_ids:
                prompt = self._prompts[i // self._per_prompt]
                entry |= {"token_ids": choice.tokens, "prompt_token_ids": list(prompt.ids)}
            choices.append(entry)
        return self.framed(choices)

    def counts(self) -> Usage:
        prompt = sum(u.prompt_tokens for u in self._usage)
        output = 0 if self._drops_output else sum(u.completion_tokens for u in self._usage)
        return Usage(prompt, sum(u.cached_tokens for u in self._usage), output)

    def _delta(self, index: int, delta: ChoiceDelta) -> Json:
        number = index * self._per_prompt + delta.index
        choice = self._choices[number]
        text: str = ""
        sent: list[_Told] = []
        if not choice.begun and self._body.echo:
            prompt, prompt_logprobs = self._prompts[index], self._prompt_logprobs[index]
            text, choice.prompt = prompt.text, len(prompt.text)
            if prompt_logprobs is not None:
                offsets = prompt_offsets(self._tokenizer, prompt.text, prompt.ids)
                sent += map(_Told, prompt.ids, offsets, prompt_logprobs)
        choice.begun = True
        if not self._drops_output:
            text += delta.text
            choice.tokens += delta.token_ids
            for known in delta.logprobs or ():
                offset = choice.prompt + choice.offsets.next(known.token_id)
                sent.append(_Told(known.token_id, offset, known))
        choice.text += text
        logprobs = None if self._body.logprobs is None else self._logprobs(sent)
        for name, values in (logprobs or {}).items():
            choice.logprobs.setdefault(name, []).extend(values)
        if delta.finish_reason is not None and "text_offset" in choice.logprobs:
            # Tokens of a stop string that the text leaves out.
            for offsets in (choice.logprobs["text_offset"], (logprobs or choice.logprobs)["text_offset"]):
                offsets[:] = [min(offset, len(choice.text)) for offset in offsets]
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        entry = self._entry(number, text, logprobs, delta.finish_reason, delta.stop_reason)
        if self._body.return_token_ids:
            entry["token_ids"] = list(delta.token_ids)
        return entry

    def _entry(self, number: int, text: str, logprobs: Json | None, finish: str | None, stop: str | int | None) -> Json:
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}

    def _logprobs(self, sent: Sequence["_Told"]) -> dict[str, list[Any]]:
        """Tokens in OpenAI's four parallel lists; the first of a prompt has no probability."""
        return {
            "text_offset": [item.offset for item in sent],
            "token_logprobs": [None if item.entry is None else item.entry.logprob for item in sent],
            "tokens": [self._text(item.token) for item in sent],
            "top_logprobs": [None if item.entry is None else self._top(item.entry) for item in sent],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one by text; of two with one text the likelier."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._text(token), logprob)
        return top
