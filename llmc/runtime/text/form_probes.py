"""Small conversations whose every word is known, and what a prompt of each has to show."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.text.normal_messages import Json

# No word is the beginning of another.
_SYSTEM, _OTHER_SYSTEM, _DEVELOPER = "qzsystem", "qzrule", "qzdeveloper"
_USER, _OTHER_USER, _THIRD_USER = "qzquestion", "qzrequest", "qzwish"
_ANSWER, _OTHER_ANSWER, _LAST_ANSWER, _THOUGHT = "qzanswer", "qzreply", "qzsaying", "qzthought"
_TOOL, _OTHER_TOOL, _PARAMETER = "qztool", "qzdevice", "qzparameter"
_NAME, _OTHER_NAME, _KEY = "qzfunction", "qzprocedure", "qzkey"
_VALUE, _OTHER_VALUE, _RESULT, _OTHER_RESULT = "qzvalue", "qzamount", "qzresult", "qzoutcome"


@dataclass(frozen=True)
class Probe:
    """A conversation that shows whether a template takes a form. shows: what a template that fails it does not show.
    once, somewhere: words that the prompt has, once or more.

    complete: the same with a value for all that has none, None if that is nothing.
    """

    shows: str
    messages: Sequence[Json]
    once: tuple[str, ...]
    somewhere: tuple[str, ...] = ()
    tools: Sequence[Json] | None = None
    complete: Sequence[Json] | None = None
    complete_tools: Sequence[Json] | None = None

    def is_shown(self, prompt: str) -> bool:
        """Whether the prompt has the words, and no value is written as Python has it or as JSON twice."""
        is_there = all(prompt.count(word) == 1 for word in self.once) and all(word in prompt for word in self.somewhere)
        return is_there and not _MISWRITTEN.search(prompt)


# A list of parts that was not read, an object that was written by Python, and a quotation mark that was escaped twice.
_MISWRITTEN = re.compile(rf"""["']type["']: ?["'](text|thinking)["']|'{_KEY}':|{_VALUE}\\\\""")


def _says(role: str, text: str, **more: Any) -> Json:
    return {"role": role, "content": text, **more}


def _tool(name: str) -> Json:
    properties = {_PARAMETER: {"type": "string", "description": f"{name}argument"}}
    parameters = {"type": "object", "properties": properties, "required": [_PARAMETER]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"{name}purpose", "parameters": parameters},
    }


def _calls(*calls: tuple[str, str], text: str | None = None, first: int = 0) -> Json:
    """calls: the name and the JSON text of the arguments of each. first: the number in the first one's id."""
    tool_calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls, first)
    ]
    return {"role": "assistant", "content": text, "tool_calls": tool_calls}


def _result(index: int, text: str) -> Json:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": text}


_SAYS_SYSTEM, _SAYS_USER, _SAYS_OTHER = _says("system", _SYSTEM), _says("user", _USER), _says("user", _OTHER_USER)
_SAYS_ANSWER, _GIVES_RESULT = _says("assistant", _ANSWER), _result(0, _RESULT)
_TOOLS = (_tool(_TOOL), _tool(_OTHER_TOOL))
_TOOL_WORDS = (_TOOL, f"{_TOOL}purpose", f"{_OTHER_TOOL}purpose", _PARAMETER)
# The quotation mark shows what is written as JSON twice, null and true what is written as Python.
_ARGUMENTS = f'{{"{_KEY}": "{_VALUE}\\"", "qzempty": null, "qzsure": true}}'
_COMPLETE_ARGUMENTS = f'{{"{_KEY}": "{_VALUE}\\"", "qzempty": "qza", "qzsure": "qzb"}}'
_CALL = _calls((_NAME, _ARGUMENTS))
_COMPLETE_CALL = _calls((_NAME, _COMPLETE_ARGUMENTS), text=_ANSWER)

USER = Probe("what a user says", (_SAYS_USER,), (_USER,))
TURNS = Probe("earlier turns", (_SAYS_USER, _SAYS_ANSWER, _SAYS_OTHER), (_USER, _ANSWER, _OTHER_USER))
BLANK = Probe("turns around an empty answer", (_SAYS_USER, _says("assistant", ""), _SAYS_OTHER), (_USER, _OTHER_USER))
ORDERS = (
    Probe("several messages of a user in a row", (_SAYS_USER, _SAYS_OTHER), (_USER, _OTHER_USER)),
    Probe("a conversation that the assistant begins", (_SAYS_ANSWER, _SAYS_USER), (_ANSWER, _USER)),
    Probe(
        "several answers in a row",
        (_SAYS_USER, _SAYS_ANSWER, _says("assistant", _OTHER_ANSWER), _SAYS_OTHER),
        (_USER, _ANSWER, _OTHER_ANSWER, _OTHER_USER),
    ),
)
SYSTEMS = (
    Probe("messages of the system", (_SAYS_SYSTEM, _SAYS_USER), (_SYSTEM, _USER)),
    Probe(
        "several messages of the system",
        (_SAYS_SYSTEM, _says("system", _OTHER_SYSTEM), _SAYS_USER),
        (_SYSTEM, _OTHER_SYSTEM, _USER),
    ),
    Probe(
        "messages of the developer and the system",
        (_SAYS_SYSTEM, _says("developer", _DEVELOPER), _SAYS_USER),
        (_SYSTEM, _DEVELOPER, _USER),
    ),
    Probe(
        "later messages of the system",
        (_SAYS_SYSTEM, _SAYS_USER, _SAYS_ANSWER, _says("system", _OTHER_SYSTEM), _SAYS_OTHER),
        (_SYSTEM, _USER, _ANSWER, _OTHER_SYSTEM, _OTHER_USER),
    ),
    Probe("a last message of the system", (_SAYS_USER, _SAYS_SYSTEM), (_SYSTEM, _USER)),
)
TOOLS = (
    Probe("tools", (_SAYS_USER,), (_USER,), _TOOL_WORDS, _TOOLS),
    Probe("tools and a message of the system", (_SAYS_SYSTEM, _SAYS_USER), (_SYSTEM, _USER), _TOOL_WORDS, _TOOLS),
    Probe("tools in later turns", TURNS.messages, TURNS.once, _TOOL_WORDS, _TOOLS),
    Probe(
        "tools without a description",
        (_SAYS_USER,),
        (_USER,),
        (_TOOL,),
        ({"type": "function", "function": {"name": _TOOL}},),
        complete=(_SAYS_USER,),
        complete_tools=(_tool(_TOOL),),
    ),
)
CALLS = (
    Probe(
        "calls and their results",
        (_SAYS_USER, _CALL, _GIVES_RESULT),
        (_USER, _VALUE, _RESULT),
        (_NAME, _KEY, *_TOOL_WORDS),
        _TOOLS,
        (_SAYS_USER, _COMPLETE_CALL, _GIVES_RESULT),
        _TOOLS,
    ),
    Probe(
        "calls in earlier turns",
        (_SAYS_USER, _CALL, _GIVES_RESULT, _SAYS_ANSWER, _SAYS_OTHER),
        (_USER, _VALUE, _RESULT, _ANSWER, _OTHER_USER),
        (_NAME, _KEY),
        _TOOLS,
    ),
)
CALL_WITHOUT_TOOLS = Probe(
    "calls of a request without tools",
    (_SAYS_USER, _CALL, _GIVES_RESULT),
    (_USER, _VALUE, _RESULT),
    (_NAME, _KEY),
    complete=(_SAYS_USER, _COMPLETE_CALL, _GIVES_RESULT),
)
_BOTH = _calls((_NAME, f'{{"{_KEY}": "{_VALUE}"}}'), (_OTHER_NAME, f'{{"{_KEY}": "{_OTHER_VALUE}"}}'))
SEVERAL_CALLS = Probe(
    "several calls in one message",
    (_SAYS_USER, _BOTH, _GIVES_RESULT, _result(1, _OTHER_RESULT)),
    (_USER, _VALUE, _OTHER_VALUE, _RESULT, _OTHER_RESULT),
    (_NAME, _OTHER_NAME),
    _TOOLS,
)
TEXTS_AND_CALLS = (
    Probe(
        "a text with a call",
        (_SAYS_USER, {**_CALL, "content": _ANSWER}, _GIVES_RESULT),
        (_USER, _ANSWER, _VALUE, _RESULT),
        tools=_TOOLS,
    ),
    Probe(
        "texts with several calls in a row",
        (
            _SAYS_USER,
            {**_CALL, "content": _ANSWER},
            _GIVES_RESULT,
            _calls((_OTHER_NAME, f'{{"{_KEY}": "{_OTHER_VALUE}"}}'), text=_OTHER_ANSWER, first=1),
            _result(1, _OTHER_RESULT),
            _says("assistant", _LAST_ANSWER),
            _SAYS_OTHER,
        ),
        (_USER, _ANSWER, _VALUE, _RESULT, _OTHER_ANSWER, _OTHER_VALUE, _OTHER_RESULT, _LAST_ANSWER, _OTHER_USER),
        tools=_TOOLS,
    ),
)
USER_AFTER_RESULT = Probe(
    "a question after a result",
    (_SAYS_USER, _CALL, _GIVES_RESULT, _SAYS_OTHER),
    (_USER, _VALUE, _RESULT, _OTHER_USER),
    tools=_TOOLS,
)
RAW_ARGUMENTS = Probe(
    "arguments that are not JSON",
    (_SAYS_USER, _calls((_NAME, f'{{"{_KEY}": "{_VALUE}')), _GIVES_RESULT),
    (_USER, _VALUE, _RESULT),
    tools=_TOOLS,
)
THOUGHT = Probe(
    "what was thought before a call",
    (_SAYS_USER, {**_CALL, "reasoning_content": _THOUGHT}, _GIVES_RESULT),
    (_USER, _THOUGHT, _VALUE, _RESULT),
    tools=_TOOLS,
)
TEXT_THOUGHT_AND_CALL = Probe(
    "a thought and a text with a call",
    (_SAYS_USER, {**_CALL, "content": _ANSWER, "reasoning_content": _THOUGHT}, _GIVES_RESULT),
    (_USER, _ANSWER, _VALUE, _RESULT),
    tools=_TOOLS,
)
# For a description of calls: a call, and another answer, to the same question.
EXAMPLE_WORDS = ("NAME", "ARGUMENT", "VALUE")
EXAMPLE = (_SAYS_USER, _calls(("NAME", '{"ARGUMENT": "VALUE"}')), _SAYS_ANSWER)
# The probes that a user is warned of. THOUGHT is not one: templates leave out thoughts because models are trained so.
ALL = (
    *(USER, TURNS, BLANK, *ORDERS, *SYSTEMS, *TOOLS, *CALLS),
    *(CALL_WITHOUT_TOOLS, SEVERAL_CALLS, *TEXTS_AND_CALLS, USER_AFTER_RESULT, RAW_ARGUMENTS, TEXT_THOUGHT_AND_CALL),
)
