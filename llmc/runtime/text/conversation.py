"""Conversations as prompts: messages rendered by the model's chat template, or by another, and tokenized."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeGuard

from llmc.engine_format import EngineFiles
from llmc.engine_format.path_argument import path_argument
from llmc.errors import LoadWarning, RequestError
from llmc.runtime.text.chat_template import ChatTemplate, engine_template, named_template, special_tokens
from llmc.runtime.text.template_renderer import TemplateInput, TemplateRenderer, warn_of_template
from llmc.runtime.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Conversation = Sequence[Message]


class ConversationPrompts:
    """Renders for one engine; its template and the renderer's processes are there from the first use on."""

    def __init__(self, engine: EngineFiles, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._renderer = TemplateRenderer()

    def token_ids(
        self,
        messages: Conversation,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The conversation as tokens; the template writes the special tokens itself. Raises RequestError.

        chat_template: a template's text, a Jinja file, or the name of a built-in one; default the model's. The others
        as in Engine.chat.
        """
        if not is_conversation(messages):
            raise RequestError(
                f"a conversation is a list of messages, not {messages!r:.80}",
                at="messages",
                fix='give [{"role": "user", "content": "..."}], or a list of such lists',
            )
        for index, message in enumerate(messages):
            if says_nothing(message):
                raise RequestError(
                    f"message {index} ({message['role']!r:.20}) has no content", at="messages", fix='give its "content"'
                )
        for name, value, is_right in (
            ("messages", messages, True),
            ("tools", tools, tools is None or _are_mappings(tools)),
            ("chat_template_kwargs", chat_template_kwargs, isinstance(chat_template_kwargs, Mapping | None)),
        ):
            _check_json(name, value, is_right)
        begins_answer = add_generation_prompt and not continue_final_message
        template_input = TemplateInput(messages, tools, begins_answer, continue_final_message, chat_template_kwargs)
        rendered = self._renderer.render(self.template(chat_template), template_input)
        for warning in rendered.warnings:
            warnings.warn(warning, LoadWarning, stacklevel=3)
        return self._tokenizer.encode(rendered.text, add_special_tokens=False)

    def template(self, given: str | None) -> ChatTemplate:
        """Return the requested template. Raises RequestError if the model has none, OptionError for none of that
        name."""
        if given is None:
            if self._own_template is None:
                raise RequestError(
                    "the model came without a chat template",
                    at=self._engine.path,
                    fix='give one: chat(messages, chat_template="plain"), or use generate',
                )
            return self._own_template
        if isinstance(given, str) and ("{%" in given or "{{" in given):
            return ChatTemplate(given, special_tokens(self._engine))
        return named_template(str(path_argument("chat_template", given)), self._engine)

    def close(self) -> None:
        """End the renderer's processes."""
        self._renderer.close()

    @cached_property
    def _own_template(self) -> ChatTemplate | None:
        template = engine_template(self._engine)
        if template is not None:
            warn_of_template(partial(self._renderer.fit, template))
        return template


def is_conversation(messages: object) -> TypeGuard[Conversation]:
    """Whether these are messages: a list of mappings with a role, at least one."""
    return _are_mappings(messages) and bool(messages) and all("role" in message for message in messages)


def says_nothing(message: Message) -> bool:
    """Whether a message has no content and is of a role that has to: an answer may be empty, and so may a result."""
    return message.get("content") is None and message["role"] in ("system", "developer", "user")


def conversations(messages: Conversation | Iterable[Conversation]) -> list[Any]:
    """Return one conversation or several as a list of them, without checking them."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        return [messages]
    items = list(messages)
    return [items] if any(isinstance(message, Mapping) for message in items) else items


def _are_mappings(values: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(values, Sequence) and all(isinstance(value, Mapping) for value in values)


def _check_json(name: str, value: object, is_right: bool) -> None:
    """Raise RequestError if that is not so, or if the value could not be sent to the renderer's process."""
    if not is_right:
        raise RequestError(
            f"{name} cannot be {value!r:.80} ({type(value).__name__})", at=name, fix="give it as OpenAI's API has it"
        )
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be written as JSON: {error}", at=name, fix="give plain values") from None
