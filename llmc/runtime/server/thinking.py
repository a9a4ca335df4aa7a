"""What a model thinks before it answers: text between tags, split off while the output comes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from llmc.errors import OptionError
from llmc.runtime.text.output_text import held_back


@dataclass(frozen=True)
class ThinkTags:
    """opening: what thinking starts with, at the start of an output. closing: what it ends with."""

    opening: str
    closing: str


@dataclass(frozen=True)
class Thinking:
    """Of one output. begun: the prompt has opened the tag already; the output may repeat it."""

    tags: ThinkTags
    begun: bool

    def tokens(self, output: Iterable[int], utf8: Callable[[int], bytes]) -> int:
        """How many tokens of an output were spent on thinking, tags included. utf8: a token's bytes."""
        opening, closing = self.tags.opening.encode(), self.tags.closing.encode()
        data, count = b"", 0
        for token in output:
            data, count = data + utf8(token), count + 1
            text = data.lstrip()
            if not self.begun and not opening.startswith(text[: len(opening)]):
                return 0
            if closing in data:
                return count
        return count if self.begun or data.lstrip().startswith(opening) else 0


# Named as vLLM's --reasoning-parser has them.
TAGS: Mapping[str, ThinkTags] = {
    "think": ThinkTags("<think>", "</think>"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": ThinkTags("<seed:think>", "</seed:think>"),
    "cohere": ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
}
_ALSO_THINK = ("deepseek_r1", "qwen3")


def think_tags(parser: str, template: str) -> ThinkTags | None:
    """Of --reasoning-parser: `auto` takes what the chat template names, `none` nothing.

    Otherwise it is a name of TAGS, or two tags. Raises OptionError for anything else.
    """
    if parser == "auto":
        return next((tags for tags in TAGS.values() if tags.opening in template or tags.closing in template), None)
    if parser == "none":
        return None
    if parser in TAGS or parser in _ALSO_THINK:
        return TAGS.get(parser, TAGS["think"])
    tags = parser.split()
    if len(tags) != 2:
        raise OptionError(
            f"--reasoning-parser cannot be {parser!r}",
            at="--reasoning-parser",
            fix=f"give auto, none, {', '.join(TAGS)}, or the two tags with a space between",
        )
    return ThinkTags(*tags)


class _Place(Enum):
    START = "start"
    THINKING = "thinking"
    GAP = "gap"
    ANSWER = "answer"


class ThinkingReader:
    """Splits an output that comes piece by piece into what is thought and the answer.

    The tags and the blanks around them are neither.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._tags = thinking.tags
        self._begun = thinking.begun
        self._place = _Place.START
        self._pending = ""
        self._told = False

    @property
    def in_answer(self) -> bool:
        """Whether thinking has ended, or was none."""
        return self._place in (_Place.GAP, _Place.ANSWER)

    def feed(self, piece: str, last: bool) -> tuple[str, str]:
        """What is certain after this piece; `last`: no other follows."""
        self._pending += piece
        thought = answer = ""
        if self._place is _Place.START:
            self._start(last)
        if self._place is _Place.THINKING:
            thought = self._think(last)
        if self._place is _Place.GAP:
            self._pending = self._pending.lstrip()
            if self._pending:
                self._place = _Place.ANSWER
        if self._place is _Place.ANSWER:
            answer, self._pending = self._pending, ""
        return thought, answer

    def _start(self, last: bool) -> None:
        """Decide whether the output begins with thinking, once enough of it has come."""
        text, opening = self._pending.lstrip(), self._tags.opening
        if text.startswith(opening):
            self._pending, self._place = text[len(opening) :], _Place.THINKING
        elif last or not opening.startswith(text):
            self._place = _Place.THINKING if self._begun else _Place.ANSWER

    def _think(self, last: bool) -> str:
        """Take what is certainly thought; blanks at both ends are none."""
        closing = self._tags.closing
        thought, found, rest = self._pending.partition(closing)
        if found:
            self._pending, self._place = rest, _Place.GAP
            thought = thought.rstrip()
        elif last:
            self._pending, thought = "", thought.rstrip()
        else:
            certain = thought[: len(thought) - held_back(thought, (closing,))].rstrip()
            self._pending, thought = thought[len(certain) :], certain
        thought = thought if self._told else thought.lstrip()
        self._told = self._told or bool(thought)
        return thought


def is_begun(tags: ThinkTags, prompt: str, continued: str | None) -> bool:
    """Whether a prompt ends inside thinking. continued: the text of the message that the output goes on with."""
    if prompt.rstrip().endswith(tags.opening):
        return True
    return continued is not None and continued.rfind(tags.opening) > continued.rfind(tags.closing)
