"""The tool calls that a model writes as text, in the forms that model families were trained on.

    hermes       <tool_call>{"name": …, "arguments": {…}}</tool_call>           Hermes, Qwen 2.5 and 3
    mistral      [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]                Mistral
    llama3_json  {"name": …, "parameters": {…}}, also after <|python_tag|>      Llama 3.1 and later
Names of the forms as vLLM's --tool-call-parser has them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.runtime.server.parsed_calls import ParsedCall, as_call, cut_calls, parse_calls
from llmc.runtime.text.output_text import held_back


@dataclass(frozen=True)
class ToolForm:
    """openings: what a call starts with. closing: what it ends with; None if it is the rest of the output.

    at_start: calls only come at the start of the output, so that text in front rules them out.
    """

    openings: tuple[str, ...]
    closing: str | None
    at_start: bool


FORMS: Mapping[str, ToolForm] = {
    "hermes": ToolForm(("<tool_call>",), "</tool_call>", False),
    "mistral": ToolForm(("[TOOL_CALLS]",), None, False),
    "llama3_json": ToolForm(("<|python_tag|>", "{"), None, True),
}


def form_of_template(template: str) -> ToolForm:
    """The form that a chat template teaches; hermes where it does not say."""
    if "<tool_call>" in template:
        return FORMS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMS["mistral"]
    if "<|python_tag|>" in template or '"parameters"' in template:
        return FORMS["llama3_json"]
    return FORMS["hermes"]


class ToolCallReader:
    """Splits an output that comes piece by piece into text and calls; a call comes out when it is whole."""

    def __init__(self, form: ToolForm, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._pending = ""
        self._seen_text = False

    def feed(self, piece: str) -> tuple[str, list[ParsedCall]]:
        """The text and the calls that are certain after this piece."""
        self._pending += piece
        text: str = ""
        calls: list[ParsedCall] = []
        while True:
            found = self._opening()
            if found is None:
                text += self._certain_text()
                return text, calls
            at, opening = found
            text += self._pending[:at]
            self._note(self._pending[:at])
            self._pending = self._pending[at:]
            end = self._end(opening)
            if end is None:
                return text, calls
            parsed = parse_calls(self._body(self._pending[:end], opening), self._names)
            calls += parsed
            if not parsed:
                text += self._pending[:end]
            self._pending = self._pending[end:]

    def finish(self, cut: bool = False) -> tuple[str, list[ParsedCall]]:
        """What is left when no piece follows: a call that lacks only its closing counts, anything else is text.

        cut: the output broke off, so that a call may have come in part.
        """
        rest, self._pending = self._pending, ""
        found = next((o for o in self._form.openings if rest.startswith(o)), None)
        if found is None or (self._form.at_start and self._seen_text):
            return rest, []
        body = self._body(rest, found)
        calls, text = parse_calls(body, self._names), ""
        if not calls:
            calls, text = cut_calls(body, self._names) if cut else ([], rest)
            text = text if calls else rest
        return text, calls

    def _opening(self) -> tuple[int, str] | None:
        """Where the first call starts, and with what."""
        if self._form.at_start:
            if self._seen_text:
                return None
            start = len(self._pending) - len(self._pending.lstrip())
            return next(((start, o) for o in self._form.openings if self._pending.startswith(o, start)), None)
        found = [(at, o) for o in self._form.openings if (at := self._pending.find(o)) >= 0]
        return min(found, default=None)

    def _certain_text(self) -> str:
        """Take what cannot be the beginning of an opening any more."""
        openings, pending = self._form.openings, self._pending
        if not self._form.at_start:
            keep = held_back(pending, openings)
        elif self._seen_text or not any(o.startswith(pending.lstrip()) for o in openings):
            keep = 0
        else:
            keep = len(pending)
        cut = len(pending) - keep
        text, self._pending = self._pending[:cut], self._pending[cut:]
        self._note(text)
        return text

    def _note(self, text: str) -> None:
        self._seen_text = self._seen_text or bool(text.strip())

    def _end(self, opening: str) -> int | None:
        """Where the call at the start of what is pending ends; None if that has not come, or is the output's end."""
        closing = self._form.closing
        if closing is None:
            return None
        at = self._pending.find(closing, len(opening))
        return None if at < 0 else at + len(closing)

    def _body(self, text: str, opening: str) -> str:
        body = text if opening == "{" else text[len(opening) :]
        return body.removesuffix(self._form.closing) if self._form.closing else body


class RequiredCallsReader:
    """Reads the JSON list of calls that `required_schema` forces; each comes out when it is whole."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._pending = ""
        self._decoder = json.JSONDecoder()

    def feed(self, piece: str) -> list[ParsedCall]:
        """The calls that this piece completes."""
        self._pending = (self._pending + piece).lstrip("[, \t\r\n")
        calls: list[ParsedCall] = []
        while self._pending.startswith("{"):
            try:
                value, end = self._decoder.raw_decode(self._pending)
            except ValueError:
                break
            call = as_call(value)
            if call is not None:
                calls.append(call)
            self._pending = self._pending[end:].lstrip("[, \t\r\n")
        return calls

    def finish(self) -> tuple[str, list[ParsedCall]]:
        """What is left of an output that broke off: a call as far as it came, or text that is not yet one."""
        rest, self._pending = self._pending, ""
        calls, text = cut_calls(rest, self._names)
        return text.strip(" \t\r\n]"), calls


def required_schema(functions: Mapping[str, dict[str, Any]], most: int | None) -> dict[str, Any]:
    """The schema of a list of at least one call of these functions, at most `most` of them.

    functions: the schema of each one's arguments by name.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, parameters in functions.items()
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if most is None else {**schema, "maxItems": most}
