"""Chat deltas of a model that thinks: its thoughts under `reasoning`, then whatever its answer is."""

from __future__ import annotations

from llmc.runtime.requests.request_output import FinishReason
from llmc.runtime.server.chat_deltas import ChatDeltas, Json, thought_json
from llmc.runtime.server.thinking import ThinkingReader


class ThinkingDeltas:
    """answer: reads what comes after the thoughts. shows: whether the client is told them."""

    def __init__(self, reader: ThinkingReader, answer: ChatDeltas, shows: bool) -> None:
        self._reader = reader
        self._answer = answer
        self._shows = shows

    def feed(self, text: str, ended: FinishReason | None) -> list[Json]:
        thought, answer = self._reader.feed(text, ended is not None)
        deltas: list[Json] = []
        if thought and self._shows:
            deltas.append(thought_json(thought))
        if answer or (ended is not None and self._reader.in_answer):
            deltas += self._answer.feed(answer, ended)
        return deltas

    def finish_reason(self, reason: FinishReason) -> str:
        return self._answer.finish_reason(reason)


class WithoutEnd:
    """The text of the token that ended the output is left out, where special tokens are shown. ends: such texts."""

    def __init__(self, ends: tuple[str, ...], inner: ChatDeltas) -> None:
        self._ends = ends
        self._inner = inner

    def feed(self, text: str, ended: FinishReason | None) -> list[Json]:
        if ended == "stop":
            text = text.removesuffix(next((end for end in self._ends if text.endswith(end)), ""))
        return self._inner.feed(text, ended)

    def finish_reason(self, reason: FinishReason) -> str:
        return self._inner.finish_reason(reason)
