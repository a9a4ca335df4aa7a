"""A conversation in the terminal: its turns, and the turns that the model sees once they fill the context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from llmc.cli.conversation_prompt import ConversationPrompt
from llmc.errors import RequestError

if TYPE_CHECKING:
    from llmc.runtime.requests.completion import Piece
    from llmc.runtime.sampling.sampling_params import SamplingParams

Message = dict[str, str]

_SUMMARIZE = {"role": "user", "content": "Summarize our conversation up to now in a few sentences."}
_SUMMARY = "A summary of the earlier conversation:"
# Shares of the context: the room reserved for an answer, for a summary, and for the turns that are kept when some are
# dropped. Turns are left out rarely, since the cached keys and values of those after them are lost.
_ANSWER, _OF_SUMMARY, _KEPT = 1 / 4, 1 / 8, 3 / 4


class WhenFull(StrEnum):
    """The policy for a conversation that fills the context: drop its oldest turns, have the model summarize them, or
    stop."""

    SHIFT = "shift"
    SUMMARIZE = "summarize"
    STOP = "stop"


@dataclass
class Conversation:
    """A conversation on the terminal. turns: all messages. The model sees those from `first` on, and `summary` in place
    of the earlier ones. settings: sampling settings of the answers."""

    prompt: ConversationPrompt
    settings: dict[str, Any]
    system: str | None = None
    when_full: WhenFull = WhenFull.SHIFT
    turns: list[Message] = field(default_factory=list)
    first: int = 0
    summary: str | None = None

    def messages(self) -> list[Message]:
        """The system message and all turns."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def shown(self) -> list[Message]:
        """The messages that the model sees."""
        return [*self._before(), *self.turns[self.first :]]

    def tokens(self, messages: Sequence[Message]) -> int:
        """The number of tokens of a prompt of these messages."""
        return len(self.prompt.token_ids(messages)) if messages else 0

    @property
    def limit(self) -> int:
        """The maximum number of tokens of a conversation."""
        return self.prompt.engine.limits.max_model_len

    def forget(self, kept: int) -> None:
        """Take back all turns but the first `kept`."""
        del self.turns[kept:]
        if self.first >= kept:
            self.first, self.summary = 0, None

    def make_room(self) -> str | None:
        """Leave out the oldest turns if the next answer would not fit.

        Returns:
            A sentence about the turns that were left out, or None.

        Raises:
            RequestError: The last message alone is too long, or the conversation is and no turn may be left out.
        """
        wanted = min(int(self.settings["max_tokens"]), int(self.limit * _ANSWER))
        before, notice = self.first, None
        if self.when_full is not WhenFull.STOP and self.tokens(self.shown()) + wanted > self.limit:
            self._leave_out(self.limit - wanted)
        if self.first > before:
            how = "are summarized" if self.summary else "are no longer shown to the model"
            notice = f"the oldest {self.first} messages {how}: the conversation fills its {self.limit} tokens"
        count = self.tokens(self.shown())
        if count >= self.limit:
            stops = self.when_full is WhenFull.STOP
            raise RequestError(
                f"the {'conversation' if stops else 'message'} has {count} tokens, the model takes {self.limit}",
                fix="start again with /clear, remove turns with /undo, or restart with --when-full shift"
                if stops
                else "send a shorter one",
            )
        return notice

    def answer(self) -> Iterator[Piece]:
        """Pieces of the next message."""
        ids = self.prompt.token_ids(self.shown())
        yield from self.prompt.engine.stream(ids, sampling(self.settings, self.limit - len(ids), self.prompt.stops()))

    def _before(self) -> list[Message]:
        summary = f"{_SUMMARY} {self.summary}" if self.summary else None
        parts = [part for part in (self.system, summary) if part]
        return [{"role": "system", "content": "\n\n".join(parts)}] if parts else []

    def _leave_out(self, most: int) -> None:
        """Start the context at a later user message, so that it has at most `most` tokens and leaves room for the next
        turns."""
        starts = [i for i, turn in enumerate(self.turns) if turn["role"] == "user" and i > self.first]
        room = min(most, int(self.limit * _KEPT))
        if self.when_full is WhenFull.SUMMARIZE:
            room -= int(self.limit * _OF_SUMMARY)
        sizes = {start: self.tokens([*self._before(), *self.turns[start:]]) for start in starts}
        start = next((start for start in starts if sizes[start] <= room), starts[-1] if starts else self.first)
        if self.when_full is WhenFull.SUMMARIZE and start > self.first:
            self.summary = self._summary_of(self.turns[self.first : start]) or self.summary
        self.first = start

    def _summary_of(self, turns: Sequence[Message]) -> str | None:
        """The model's summary of these turns and of the summary before them; None if they do not fit."""
        size = int(self.limit * _OF_SUMMARY)
        while turns and self.tokens([*self._before(), *turns, _SUMMARIZE]) + size > self.limit:
            turns = turns[2:]
        if not turns or not size:
            return None
        ids = self.prompt.token_ids([*self._before(), *turns, _SUMMARIZE])
        params = sampling({**self.settings, "max_tokens": size}, size, self.prompt.stops())
        return self.prompt.engine.generate(ids, params)[0].text.strip() or None


def sampling(settings: dict[str, Any], room: int, stop: tuple[str, ...]) -> SamplingParams:
    """Sampling parameters of the settings, within the room that is left."""
    from llmc.runtime.sampling.sampling_params import SamplingParams

    values: dict[str, Any] = {**settings, "max_tokens": min(int(settings["max_tokens"]), room), "stop": stop}
    return SamplingParams(**values)
