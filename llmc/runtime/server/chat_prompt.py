"""Chat messages to a prompt, as the template expects them."""

import re
from collections.abc import Sequence
from typing import Any

from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.schemas.chat import ChatRequest, Message
from llmc.runtime.server.schemas.fields import known_of
from llmc.runtime.server.schemas.tokens import TokenizeRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.tokenizing import check_text
from llmc.runtime.text.conversation import says_nothing
from llmc.runtime.text.template_renderer import RenderedPrompt, TemplateInput

# Template variables that turn thinking off: Qwen's, and that of DeepSeek and Granite.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


async def chat_prompt(
    model: ServedModel, body: ChatRequest | TokenizeRequest, messages: Sequence[Message], *, shows_tools: bool = True
) -> RenderedPrompt:
    """Render the prompt of a chat request. messages: the messages of the body to render."""
    template_input = TemplateInput(
        messages=[checked_message(message) for message in messages],
        tools=[known_of(tool) for tool in body.tools] if body.tools and shows_tools else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        extra=template_variables(body) if isinstance(body, ChatRequest) else body.chat_template_kwargs,
    )
    return await model.render(template_input, body.chat_template)


def checked_message(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form with its content as one text. 400 for text that cannot be tokenized, and for a message
    without required content."""
    checked = message.model_dump(exclude_none=True)
    for text in (message.text(), message.reasoning, message.reasoning_content):
        if text is not None:
            check_text(text, "messages")
    checked |= {"content": message.text()}
    if says_nothing(checked):
        raise bad_request(f"a message of the role {message.role!r} has no content", "messages")
    return checked


def template_variables(body: ChatRequest) -> dict[str, Any]:
    documents = {} if body.documents is None else {"documents": body.documents}
    reasoning: dict[str, Any] = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    if body.reasoning_effort == "none":
        reasoning |= dict.fromkeys(_THINKING_SWITCHES, False)
    return {**documents, **reasoning, **(body.chat_template_kwargs or {})}


def template_warnings(model: ServedModel, body: ChatRequest) -> list[str]:
    """A sentence if reasoning_effort changes nothing, because the template does not use it."""
    effort = body.reasoning_effort
    source = body.chat_template or ("" if model.template is None else model.template.source)
    names = ("reasoning_effort", *_THINKING_SWITCHES) if effort == "none" else ("reasoning_effort",)
    if effort is None or any(re.search(rf"\b{name}\b", source) for name in names):
        return []
    return ["reasoning_effort is ignored: the model's chat template has no such setting"]
