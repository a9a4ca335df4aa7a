"""Input items of /v1/responses that stand for tools that only the client's provider runs: read as calls of functions
where they are such, and else left out."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Json = dict[str, Any]

READ = ("message", "function_call", "function_call_output", "reasoning")
# Refused: the conversation would lose the item that it names.
REFERENCE = "item_reference"


def readable_items(items: list[Any]) -> tuple[list[Any], list[str]]:
    """Read the items that stand for calls as function calls, and leave out the others of unknown types.

    Returns:
        The items, and a sentence for each type that was not read as it came.
    """
    readable: list[Any] = []
    notes: dict[str, None] = {}
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind in READ or kind == REFERENCE:
            readable.append(item)
            continue
        read = list(_read(kind, item))
        notes[f"input items of type {kind:.60} are {'read as calls of functions' if read else 'left out'}"] = None
        readable += read
    return readable, list(notes)


def _read(kind: str, item: Json) -> Iterator[Json]:
    """The call and the result that an item stands for."""
    identity = item.get("call_id") or item.get("id") or ""
    if kind in _CALLS:
        name, arguments = _CALLS[kind](item)
        yield {"type": "function_call", "call_id": identity, "name": str(name), "arguments": arguments}
    if kind in _RESULTS or (kind == "mcp_call" and (item.get("output") or item.get("error"))):
        output = next((item[name] for name in ("output", "error", "tools") if item.get(name) is not None), "")
        yield {"type": "function_call_output", "call_id": identity, "output": _output(output)}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _output(value: Any) -> Any:
    """A text, or parts of a message's content; anything else as JSON."""
    is_content = isinstance(value, list) and all(isinstance(part, dict) and "type" in part for part in value)
    return value if isinstance(value, str) or (is_content and "text" in str(value)) else _json(value)


_CALLS: Mapping[str, Callable[[Json], tuple[Any, str]]] = {
    "custom_tool_call": lambda item: (item.get("name", ""), _json({"input": item.get("input") or ""})),
    "local_shell_call": lambda item: ("local_shell", _json(item.get("action") or {})),
    "shell_call": lambda item: ("shell", _json(item.get("action") or {})),
    "apply_patch_call": lambda item: ("apply_patch", _json(item.get("operation") or {})),
    "tool_search_call": lambda item: ("tool_search", _json(item.get("arguments") or {})),
    "mcp_call": lambda item: (item.get("name", ""), str(item.get("arguments") or "{}")),
}
_RESULTS = frozenset(
    {
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
        "tool_search_output",
    }
)
