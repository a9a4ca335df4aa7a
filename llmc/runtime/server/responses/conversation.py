"""Items of /v1/responses as chat messages, and a request as the chat request that it stands for."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter

from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.schemas.chat import MAX_MESSAGES, ChatRequest, FunctionCall, Message, ToolCall
from llmc.runtime.server.schemas.fields import known_of, unknown_in
from llmc.runtime.server.schemas.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputItems,
    MessageItem,
    ReasoningItem,
)
from llmc.runtime.server.schemas.responses import AllowedTools, NamedChoice, ResponsesRequest, SchemaTextFormat
from llmc.runtime.server.schemas.text_parts import text_of
from llmc.runtime.server.schemas.token_fields import TokenFields

LOGPROBS = "message.output_text.logprobs"
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(InputItems)


def input_items(body: ResponsesRequest) -> list[InputItem]:
    """The input as items; a text is a user's message."""
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def output_items(output: Sequence[dict[str, Any]]) -> list[InputItem]:
    """A response's output as the input of the next one."""
    return _ITEMS.validate_python(output) if output else []


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """Chat messages: what the assistant thought, said and called in a row is one message."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, ReasoningItem) and not item.text():
            continue  # Clients replay items whose thoughts are encrypted, or are none.
        if isinstance(item, FunctionCallOutputItem):
            messages.append(Message(role="tool", content=text_of(item.output), tool_call_id=item.call_id))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(Message(role=item.role, content=item.text()))
        else:
            if not messages or not _goes_on(messages[-1], item):
                messages.append(Message(role="assistant"))
            _add(messages[-1], item)
    return messages


def chat_request(body: ResponsesRequest, messages: Sequence[Message]) -> ChatRequest:
    """The chat request with the same answer. Raises ApiError for tool choices that name no tool."""
    shared = {name: getattr(body, name) for name in TokenFields.model_fields}
    tools, choice = _tools(body)
    system = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    if len(system) + len(messages) > MAX_MESSAGES:
        raise bad_request(f"the conversation has {len(messages)} messages, more than {MAX_MESSAGES}", "input")
    return ChatRequest(
        **shared,
        messages=[*system, *messages],
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream,
        logprobs=logprobs,
        top_logprobs=(body.top_logprobs or 0) if logprobs else None,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def warnings_of_parts(body: ResponsesRequest) -> list[str]:
    """A warning for each ignored setting inside a field, and for each omitted part."""
    warnings = [*body.left_out]
    warnings += [
        f"include {entry:.80} is ignored: it is not supported here" for entry in body.include or () if entry != LOGPROBS
    ]
    for name in ("tools", "text", "reasoning", "stream_options"):
        warnings += unknown_in(name, getattr(body, name))
    if body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
        warnings.append("reasoning.summary is ignored: reasoning items hold the reasoning itself")
    if body.text is not None and body.text.verbosity is not None:
        warnings.append("text.verbosity is ignored: the model's template has no such setting")
    return warnings


def _goes_on(message: Message, item: InputItem) -> bool:
    """Whether an assistant's item belongs to the message before."""
    if message.role != "assistant" or isinstance(item, ReasoningItem):
        return False
    return isinstance(item, FunctionCallItem) or (message.content is None and not message.tool_calls)


def _add(message: Message, item: InputItem) -> None:
    if isinstance(item, ReasoningItem):
        message.reasoning = item.text()
    elif isinstance(item, FunctionCallItem):
        call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
        message.tool_calls = [*(message.tool_calls or ()), call]
    elif isinstance(item, MessageItem):
        message.content = item.text()


def _tools(body: ResponsesRequest) -> tuple[Any, Any]:
    """Tools and tool_choice in chat's form."""
    tools, choice = list(body.tools or ()), body.tool_choice
    if isinstance(choice, AllowedTools):
        names = {tool.name for tool in choice.tools}
        unknown = names - {tool.name for tool in tools}
        if unknown:
            raise bad_request(f"tool_choice allows {min(unknown)!r:.80}, which is not among the tools", "tool_choice")
        tools = [tool for tool in tools if tool.name in names]
    definitions = [{**known_of(tool)} for tool in tools]
    functions = [{"type": definition.pop("type"), "function": definition} for definition in definitions]
    if isinstance(choice, NamedChoice):
        return functions, {"type": "function", "function": {"name": choice.name}}
    return functions or None, choice.mode if isinstance(choice, AllowedTools) else choice


def _format(body: ResponsesRequest) -> Any:
    form = None if body.text is None else body.text.format
    if isinstance(form, SchemaTextFormat):
        inner = form.model_dump(exclude={"type", "json_schema"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": {**inner, "schema": form.json_schema}}
    return None if form is None else form.model_dump()
