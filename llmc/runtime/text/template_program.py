"""A chat template as a program: compiled, with the form that it takes, and prompts made with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmc.runtime.text.conversation_form import Calls, ConversationForm, Tools
from llmc.runtime.text.form_search import Fit, fit
from llmc.runtime.text.formed_conversation import formed
from llmc.runtime.text.normal_messages import Json, text_of_parts

if TYPE_CHECKING:
    from jinja2 import Environment, Template

TOOLS_ARE_DESCRIBED = "the chat template has no place for tools: a message of the system describes them"


class NotShownError(ValueError):
    """The template leaves out a part of the conversation; which, after its name."""


class TooLongError(ValueError):
    """The prompt has more characters than it may."""


@dataclass(frozen=True)
class Question:
    """The input of a prompt. messages: as normal_messages makes them. variables: other variables of the template, such
    as add_generation_prompt. continues: the prompt ends inside the last message. call_example: see ChatTemplate."""

    messages: Sequence[Json]
    tools: Sequence[Json] | None
    variables: Mapping[str, Any]
    continues: bool
    call_example: str | None = None


class TemplateProgram:
    """A template's text, compiled when it is used first. special_tokens: variables of every prompt. most: characters of
    a prompt."""

    def __init__(self, environment: Environment, source: str, special_tokens: Mapping[str, str], most: int) -> None:
        self._environment = environment
        self._source = source
        self._always = {"documents": None, **special_tokens}
        self._most = most

    @cached_property
    def fit(self) -> Fit:
        """Return how the template takes conversations. An exception in the template means that it does not take the
        form."""
        return fit(self._source, self._rendered, self._always.get("eos_token") or "")

    @property
    def describes_tools(self) -> bool:
        """Whether the template has no place for tools."""
        return self.fit.form.tools is Tools.DESCRIBED

    def has_place_for(self, question: Question) -> bool:
        """Whether the template itself writes the tools and calls of a request."""
        calls = any("tool_calls" in message for message in question.messages)
        takes_calls = not calls or self.fit.form.calls is not Calls.AS_TEXT
        return takes_calls and not (question.tools and self.describes_tools)

    def warnings(self, question: Question) -> list[str]:
        """Sentences about the prompt for the client."""
        return [TOOLS_ARE_DESCRIBED] if question.tools and self.describes_tools else []

    def prompt(self, question: Question) -> str:
        """Render the prompt.

        Raises:
            NotShownError: A part of the conversation is not in the prompt.
            TooLongError: The prompt is too long.
            Exception: Any that the template raises.
        """
        variables = {**question.variables, **formed(question.messages, question.tools, self._form(question))}
        prompt = self._rendered(variables)
        if self.fit.lacks:
            self._check_shown(question)
        return _until_last_message(prompt, variables["messages"]) if question.continues else prompt

    def _form(self, question: Question) -> ConversationForm:
        form, example = self.fit.form, question.call_example
        return form if example is None else replace(form, call_example=example)

    @cached_property
    def _template(self) -> Template:
        return self._environment.from_string(self._source)

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(**{**self._always, **variables}):
            pieces.append(piece)
            size += len(piece)
            if size > self._most:
                raise TooLongError(f"the prompt is longer than {self._most} characters")
        return "".join(pieces)

    def _check_shown(self, question: Question) -> None:
        """Raise NotShownError for a message that is not in the prompt, by a conversation of the same shape in which
        each has its own word: what it says may be changed by the template."""
        words = {index: f"qz{index}word" for index, message in enumerate(question.messages) if message["content"]}
        shape = [
            {**message, "content": words.get(index, message["content"])}
            for index, message in enumerate(question.messages)
        ]
        prompt = self._rendered({**question.variables, **formed(shape, question.tools, self._form(question))})
        for index, word in words.items():
            if prompt.count(word) != 1:
                role, count = question.messages[index].get("role"), prompt.count(word)
                how = "does not show" if count == 0 else f"writes {count} times"
                raise NotShownError(f"{how} message {index} ({role!r:.20})")
        lost = [name for name in _called(shape) if name not in prompt]
        if lost:
            raise NotShownError(f"does not show the call of {lost[0]!r:.80}")


def _called(messages: Sequence[Json]) -> list[str]:
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return [str(call["function"].get("name", "")) for call in calls]


def _until_last_message(prompt: str, messages: Sequence[Json]) -> str:
    """The prompt up to the end of the last message's content."""
    content = messages[-1].get("content") if messages else None
    text = text_of_parts(content) if isinstance(content, list) else content
    if not isinstance(text, str) or not text.strip():
        raise ValueError("continue_final_message needs a last message with text")
    at = prompt.rfind(text.strip())
    if at < 0:
        raise ValueError("the template does not contain the last message's text as it is")
    return prompt[: at + len(text.strip())]
