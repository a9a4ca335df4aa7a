"""Tools that only the client's provider runs, such as web searches and MCP servers: omitted with a warning."""

from collections.abc import Sequence
from typing import Any

_FUNCTION, _ALLOWED = "function", "allowed_tools"


def functions_alone(body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Leave out tools that are not functions, and a tool_choice of them.

    Returns:
        The body without them, and a sentence for each type that was left out.
    """
    tools, choice = body.get("tools"), body.get("tool_choice")
    kinds = [kind for tool in tools if (kind := _other_kind(tool))] if isinstance(tools, list) else []
    known, notes = (
        dict(body),
        [f"tools of type {kind:.60} are left out: they are not run here" for kind in _each(kinds)],
    )
    if isinstance(tools, list) and kinds:
        known["tools"] = [tool for tool in tools if not _other_kind(tool)] or None
    chosen = _other_kind(choice) if isinstance(choice, dict) else None
    if chosen == _ALLOWED and isinstance(choice, dict):
        known["tool_choice"], chosen = _allowed(choice), None
    if chosen:
        notes.append(f"tool_choice is ignored: tools of type {chosen:.60} are not run here")
        known["tool_choice"] = None
    if kinds and known["tools"] is None and known.get("tool_choice") == "auto":
        known["tool_choice"] = None
    return known, notes


def _allowed(choice: dict[str, Any]) -> dict[str, Any] | None:
    """The choice restricted to the functions of the allowed tools; None if there are none."""
    tools = choice.get("tools")
    if not isinstance(tools, list):
        return choice
    functions = [tool for tool in tools if not _other_kind(tool)]
    return {**choice, "tools": functions} if functions or not tools else None


def _other_kind(tool: Any) -> str | None:
    """The type of a tool that is not a function; None for a function, and for a value that is not a tool."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind != _FUNCTION else None


def _each(kinds: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(kinds))
