"""The grammar of an output that is tool calls and nothing else, in a form."""

from collections.abc import Callable, Sequence

from llmc.runtime.grammar.grammar import Mark
from llmc.runtime.server.tool_calls.form import ToolForm
from llmc.runtime.server.tool_calls.grammar_text import GrammarText
from llmc.runtime.server.tool_calls.tools import Tools


def call_grammar(form: ToolForm, tools: Tools, spell: Callable[[str], Sequence[Mark]], single: bool) -> str:
    """Return the grammar of calls in Lark's notation. spell: as in GrammarText. single: exactly one call, instead of at
    least one."""
    text, layout = GrammarText(spell), form.layout
    call = text.rule(_joined(text.mark(layout.begin), form.notations[0].write(text, tools), text.mark(layout.end)))
    more = "" if single else f"({_joined(text.mark(layout.between), call)})*"
    return text.finished(_joined(text.mark(layout.before), call, more, text.mark(layout.after)))


def _joined(*expressions: str) -> str:
    return " ".join(filter(None, expressions))
