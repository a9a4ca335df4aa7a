"""How models write two calls in each form, with text in front, as their chat templates and model cards have it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.server.output_events import CallArguments, CallBegun, Event, Text, Thought
from llmc.runtime.server.output_reader import OutputReader
from llmc.runtime.server.tool_calls.call_reader import CallReader
from llmc.runtime.server.tool_calls.channels import ChannelReader
from llmc.runtime.server.tool_calls.known_forms import NAMES
from llmc.runtime.server.tool_calls.tools import tools_of

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["C", "F"]},
            "where": {"$ref": "#/$defs/Place"},
            "alerts": {"type": ["boolean", "null"]},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Place": {"type": "object", "properties": {"lat": {"type": "number"}, "tags": {"type": "array"}}}},
    },
    "now": {"type": "object", "properties": {}},
}
TOOLS = tools_of(SCHEMAS)
ARGUMENTS = {"city": "Łódź", "days": 3, "where": {"lat": 51.75, "tags": ["a", "b"]}, "alerts": None}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
WEATHER, NOW = ("weather", JSON), ("now", "{}")
Call = tuple[str, str]


@dataclass(frozen=True)
class Said:
    """What an output says: thoughts, text, and calls with their arguments."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thoughts: str = ""


def said(events: Iterable[Event]) -> Said:
    """All pieces put together."""
    texts: dict[type[Text] | type[Thought], str] = {Text: "", Thought: ""}
    calls: list[Call] = []
    for event in events:
        if isinstance(event, CallBegun):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = calls[-1][0], calls[-1][1] + event.text
        else:
            texts[type(event)] += event.text
    return Said(texts[Text], tuple(calls), texts[Thought])


def reader(form: str) -> OutputReader:
    known = NAMES[form]
    return ChannelReader(TOOLS) if known.channels else CallReader(known, TOOLS)


def read(form: str, pieces: Sequence[str], *, cut: bool = False) -> Said:
    """What a form's reader finds in an output that comes in these pieces."""
    reading, events = reader(form), list[Event]()
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        events += reading.feed(piece, ended=last, cut=cut and last)
    return said(events)


_XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nŁódź\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=where>\n{"lat": 51.75, "tags": ["a", "b"]}\n</parameter>\n<parameter=alerts>\nnull\n</parameter>\n'
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
_GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Łódź</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n<arg_key>where</arg_key>\n"
    '<arg_value>{"lat": 51.75, "tags": ["a", "b"]}</arg_value>\n<arg_key>alerts</arg_key>\n'
    "<arg_value>null</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
)
_INVOKE = (
    '<invoke name="weather">\n<parameter name="city">Łódź</parameter>\n<parameter name="days">3</parameter>\n'
    '<parameter name="where">{"lat": 51.75, "tags": ["a", "b"]}</parameter>\n'
    '<parameter name="alerts">null</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
)
_DSML = "".join(
    f'<｜DSML｜parameter name="{name}" string="{str(name == "city").lower()}">{value}</｜DSML｜parameter>\n'
    for name, value in {
        "city": "Łódź",
        "days": 3,
        "where": '{"lat": 51.75, "tags": ["a", "b"]}',
        "alerts": "null",
    }.items()
)
_DSML = f'<｜DSML｜invoke name="weather">\n{_DSML}</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
_PYTHON = '[weather(city="Łódź", days=3, where={"lat": 51.75, "tags": ["a", "b"]}, alerts=None), now()]'
_LINES = f'{{"name": "weather", "arguments": {JSON}}}'
_LIST = f'[{_LINES}, {{"name": "now", "arguments": {{}}}}]'
_GEMMA = "call:weather{city:QŁódźQ,days:3,where:{lat:51.75,tags:[QaQ,QbQ]},alerts:null}"

# Each form's calls of `weather` and `now`.
CALLS: dict[str, str] = {
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "deepseek_v32": f"<｜DSML｜function_calls>\n{_DSML}</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{_DSML}</｜DSML｜tool_calls>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "minimax_m2": f"<minimax:tool_call>\n{_INVOKE}</minimax:tool_call>",
    "seed_oss": _XML.replace("tool_call>", "seed:tool_call>")
    .replace(">\nŁ", ">Ł")
    .replace(">\n3", ">3")
    .replace(">\n{", ">{")
    .replace(">\nnull", ">null")
    .replace("\n</parameter>", "</parameter>"),
    "gemma4": f"<|tool_call>{_GEMMA}<tool_call|><|tool_call>call:now{{}}<tool_call|>".replace("Q", '<|"|>'),
    "functiongemma": f"<start_function_call>{_GEMMA}<end_function_call>".replace("Q", "<escape>")
    + "<start_function_call>call:now{}<end_function_call>",
    "cohere_command": f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {JSON}}},\n'
    '    {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    "lfm2": f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>",
    "olmo3": f"<function_calls>{_PYTHON[1:-1]}</function_calls>".replace(", now", "\nnow"),
    "qwen3_coder": _XML,
    "glm47": _GLM.replace("\n", ""),
    "glm45": _GLM,
    "functionary_v3_1": f"<function=weather>{JSON}</function><function=now>{{}}</function>",
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {JSON}}}\n<|action_end|>\n'
    '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}\n<|action_end|>',
    "longcat": f"<longcat_tool_call>\n{_LINES}\n</longcat_tool_call>\n"
    '<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>',
    "apertus": f'<|tools_prefix|>[{{"weather": {JSON}}}, {{"now": {{}}}}]<|tools_suffix|>',
    "phi4_mini_json": f"functools{_LIST}",
    "granite": f"<|tool_call|>{_LIST}",
    "granite-20b-fc": f'<function_call> {_LINES}\n<function_call> {{"name": "now", "arguments": {{}}}}',
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}",
    "mistral": f"[TOOL_CALLS] {_LIST}",
    "hermes": f'<tool_call>\n{_LINES}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
    "minimax": f'<tool_calls>\n{_LINES}\n{{"name": "now", "arguments": {{}}}}\n</tool_calls>',
    "pythonic": _PYTHON,
    "llama3_json": f'{{"name": "weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
}
# Forms of which a grammar writes one call.
ONE_CALL: dict[str, str] = {
    "openai": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}",
    "gigachat3": f"function call<|role_sep|>\n{_LINES}",
}
# Their calls are only calls where no text comes before.
AT_START = ("pythonic", "llama3_json")
