"""The form in which a chat template takes a conversation, as data."""

from dataclasses import dataclass
from enum import Enum

from llmc.runtime.text.tool_text import HERMES, CallStyle


class Systems(Enum):
    """The allowed places of system messages. Unless they may be anywhere, all of them are joined."""

    ANYWHERE = "anywhere"
    FIRST = "first"
    IN_USER = "in the user's first message"


class Absent(Enum):
    """The content of a message that has only calls."""

    EMPTY = "an empty text"
    NULL = "null"
    LEFT_OUT = "no key"


class Arguments(Enum):
    """The arguments of a call. TEXTS: an object whose values are texts, those that are none written as JSON.
    WITHOUT_NULL: only null is written so."""

    OBJECT = "object"
    WITHOUT_NULL = "object without null"
    TEXTS = "object of texts"
    TEXT = "JSON text"


class Ids(Enum):
    """The ids of calls. SHORT: nine letters and digits, as Mistral's. NAMED: with the function's name, as Kimi's."""

    GIVEN = "as given"
    SHORT = "nine characters"
    NAMED = "functions.NAME:INDEX"


class Calls(Enum):
    """The calls of one message. ONE_EACH: a message for each, with its result after it."""

    TOGETHER = "together"
    ONE_EACH = "one a message"
    AS_TEXT = "in the content"


class Tools(Enum):
    """WHOLE: as OpenAI has them. FUNCTIONS: what is in their `function`. DESCRIBED: by a message of the system."""

    WHOLE = "whole"
    FUNCTIONS = "functions"
    DESCRIBED = "described"


@dataclass(frozen=True)
class ConversationForm:
    """The form that a template takes. The defaults are how transformers passes conversations to templates.

    parts: roles whose content is a list of parts. alternates: user and assistant alternate, the user first. blanks: the
    assistant's message may be empty. developer: the role is known.

    tools_name: the template's variable for tools. lists_no_tools: if there are none, it is an empty list.
    fills_tools: each needs a description and parameters.

    calls_need_tools: calls are written as text if a request has no tools. calls_with_text: a message may have both.
    call_style: the style of calls as text. call_example: an example call in another style, where tools are described;
    calls as text follow it. raw_arguments: arguments that are not a JSON object are passed as text. results: have the
    role `tool`, or are the user's. thought: the key of the assistant's thoughts, or `parts`. thought_with_text: a
    message of calls may have both.
    """

    parts: frozenset[str] = frozenset()
    alternates: bool = False
    blanks: bool = True
    systems: Systems = Systems.ANYWHERE
    developer: bool = False
    tools: Tools = Tools.WHOLE
    tools_name: str = "tools"
    lists_no_tools: bool = False
    fills_tools: bool = False
    calls: Calls = Calls.TOGETHER
    calls_need_tools: bool = False
    calls_with_text: bool = True
    call_style: CallStyle = HERMES
    call_example: str | None = None
    arguments: Arguments = Arguments.OBJECT
    raw_arguments: bool = True
    absent: Absent = Absent.EMPTY
    ids: Ids = Ids.GIVEN
    results: bool = True
    thought: str = "reasoning_content"
    thought_with_text: bool = True
