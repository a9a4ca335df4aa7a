"""A model's thoughts before its answer: text between tags, separated while the output is generated."""

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass

from llmc.errors import OptionError
from llmc.runtime.server.output_events import Text, Thought
from llmc.runtime.server.output_reader import OutputReader
from llmc.runtime.text.incoming import Wait


@dataclass(frozen=True)
class ThinkTags:
    """The tags around thoughts. opening: what thinking starts with, at the start of an output. closing: what it ends
    with.

    answer: Tags that may enclose the answer after it. repeats: several thoughts may follow each other.
    """

    opening: str
    closing: str
    answer: tuple[str, str] | None = None
    repeats: bool = False


@dataclass(frozen=True)
class Thinking:
    """The thoughts of one output. begun: the prompt already has the opening tag; the output may repeat it.

    interrupts: marks that end the thinking without its tag, and belong to the answer.
    """

    tags: ThinkTags
    begun: bool
    interrupts: tuple[str, ...] = ()

    def tokens(self, output: Iterable[int], utf8: Callable[[int], bytes]) -> int:
        """Return the number of tokens of an output that were spent on thinking, tags included. utf8: a token's
        bytes."""
        opening = self.tags.opening.encode()
        ends = [end.encode() for end in (self.tags.closing, *self.interrupts)]
        data, begun, count, thought = bytearray(), self.begun, 0, 0
        for token in output:
            unseen = max(0, len(data) - max(map(len, ends)))
            data += utf8(token)
            count += 1
            if not begun:
                text = data.lstrip()
                if not opening.startswith(text[: len(opening)]):
                    return thought
                begun = text.startswith(opening)
            if begun and any(data.find(end, unseen) >= 0 for end in ends):
                thought = count
                if not self.tags.repeats:
                    return thought
                data, begun = bytearray(data.partition(ends[0])[2]), False
        return count if begun else thought


# Named as vLLM's --reasoning-parser has them.
TAGS: Mapping[str, ThinkTags] = {
    "granite": ThinkTags("<think>", "</think>", ("<response>", "</response>")),
    "hunyuan_a13b": ThinkTags("<think>", "</think>", ("<answer>", "</answer>")),
    "think": ThinkTags("<think>", "</think>"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": ThinkTags("<seed:think>", "</seed:think>"),
    "cohere": ThinkTags("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "gemma4": ThinkTags("<|channel>thought", "<channel|>"),
    "granite_3_2": ThinkTags("Here is my thought process:", "Here is my response:"),
    "apriel": ThinkTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
}
# How harmony's channels think, which are read as a whole.
CHANNELS = ThinkTags("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", repeats=True)
_ALSO_THINK = ("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "minimax_m2", "olmo3", "nemotron_v3")


def think_tags(parser: str, template: str) -> ThinkTags | None:
    """The tags of --reasoning-parser: `auto` takes those of the chat template, `none` has none.

    Otherwise it is a name of TAGS, or two tags. Raises OptionError for anything else.
    """
    if parser == "auto":
        named = [tags for tags in TAGS.values() if tags.opening in template or tags.closing in template]
        return min(named, key=lambda tags: _unlikeness(tags, template), default=None)
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
    opening, closing = tags
    return ThinkTags(opening, closing)


def _unlikeness(tags: ThinkTags, template: str) -> int:
    """Return how much a template that contains the tags differs from a known one, by the tags of the answer."""
    if tags.answer is None:
        return 1
    return 0 if tags.answer[0] in template else 2


class ThinkingReader(OutputReader):
    """Splits an output into thoughts and the answer. The tags and the blanks around them belong to neither."""

    def __init__(self, thinking: Thinking) -> None:
        super().__init__()
        self._thinking = thinking
        self.in_answer = False

    def _read(self) -> Generator[None, None, None]:
        source, tags = self._source, self._thinking.tags
        blank = yield from source.skip_blank()
        if (yield from source.takes(tags.opening)) or self._thinking.begun:
            yield from source.skip_blank()
            closing = yield from self._thoughts()
            if closing is None:
                return
            source.at += len(closing) if closing == tags.closing else 0
            yield from source.skip_blank()
            blank = ""
        self.in_answer = True
        if tags.answer is not None and (yield from source.takes(tags.answer[0])):
            yield from source.skip_blank()
            yield from source.until((tags.answer[1],), self._answer)
            yield from source.takes(tags.answer[1])
            blank = ""
        self._answer(blank)
        yield from source.until((), self._answer)

    def _thoughts(self) -> Wait[str | None]:
        """Emit the thoughts, without blanks at their end; return the mark after them, which is not read."""
        held, stops = "", (self._thinking.tags.closing, *self._thinking.interrupts)
        while True:
            text, stop = yield from self._source.piece(stops)
            thought = (held + text).rstrip()
            held = (held + text)[len(thought) :]
            if thought:
                self._say(Thought(thought))
            if stop is not None or not text:
                return stop

    def _answer(self, text: str) -> None:
        if text:
            self._say(Text(text))


def is_begun(tags: ThinkTags, prompt: str, continued: str | None) -> bool:
    """Whether a prompt ends inside thinking. continued: the text of the message that the output continues."""
    if prompt.rstrip().endswith(tags.opening):
        return True
    return continued is not None and continued.rfind(tags.opening) > continued.rfind(tags.closing)
