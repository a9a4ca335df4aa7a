"""The prompt of a response's conversation; with truncation `auto` its oldest turns are left out until it fits."""

from functools import partial

from llmc.runtime.server.chat_prompt import chat_prompt
from llmc.runtime.server.prompt_truncation import MOST_CONTEXTS
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.text.template_renderer import RenderedPrompt


async def fitted_prompt(
    model: ServedModel, chat: ChatRequest, *, shows_tools: bool, shortens: bool
) -> tuple[RenderedPrompt, list[int]]:
    """The prompt and its token ids. shortens: leave out as few of the oldest turns as possible.

    A turn begins with a user's message; what the system says stays. The last turn is never left out.
    """
    if not shortens:
        return await _prompt(model, chat, 0, shows_tools, model.max_model_len, "shorten it, or ask for truncation=auto")
    turns = [i for i, message in enumerate(chat.messages) if message.role == "user"] or [0]
    room = model.max_model_len - max(1, chat.max_completion_tokens or 1)
    first, last = 0, len(turns) - 1
    since = partial(_prompt, model, chat, shows_tools=shows_tools, most=MOST_CONTEXTS * model.max_model_len)
    fitting = await since(0)
    if len(fitting[1]) <= room:
        return fitting
    # The fewer turns there are, the shorter is the prompt.
    while first < last:
        middle = (first + last) // 2
        tried = await since(turns[middle])
        if len(tried[1]) <= room:
            last = middle
        else:
            first = middle + 1
    return await since(turns[last])


async def _prompt(
    model: ServedModel, chat: ChatRequest, start: int, shows_tools: bool, most: int, fix: str = "shorten it"
) -> tuple[RenderedPrompt, list[int]]:
    """Render the prompt without the messages before `start`, except those of the system. most, fix: as in
    ServedModel.tokenize."""
    kept = [message for message in chat.messages[:start] if message.role in ("system", "developer")]
    prompt = await chat_prompt(model, chat, [*kept, *chat.messages[start:]], shows_tools=shows_tools)
    return prompt, await model.tokenize(prompt.text, chat.add_special_tokens, most, fix=fix)
