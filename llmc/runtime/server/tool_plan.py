"""The consequences of a chat request's tools and tool_choice for its output."""

from dataclasses import dataclass, field, replace

from llmc.runtime.grammar.grammar import Grammar, GrammarKind
from llmc.runtime.server.errors import bad_request
from llmc.runtime.server.model_forms import UNKNOWN_FORM
from llmc.runtime.server.sampling import grammar_of
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.tool_calls.call_grammar import call_grammar
from llmc.runtime.server.tool_calls.tools import ANY_ARGUMENTS, Tools, tools_of


@dataclass(frozen=True)
class ToolPlan:
    """The consequences of tool_choice for a request.

    grammar: the constraint of the output; None for none. tools: the functions whose calls are recognised. single: at
    most one call. calls_only: the grammar allows only calls. forced: the function that the output must call.
    shows_tools: whether the template receives the tools. warnings: warnings for the answer.
    """

    grammar: Grammar | None
    tools: Tools = field(default_factory=dict)
    single: bool = False
    calls_only: bool = False
    forced: str | None = None
    shows_tools: bool = True
    warnings: tuple[str, ...] = ()


def tool_plan(model: ServedModel, body: ChatRequest) -> ToolPlan:
    """Read tools, tool_choice and response_format; 400 where they contradict each other."""
    described = body.tools or []
    choice = body.tool_choice if body.tool_choice is not None else ("auto" if described else "none")
    tools = tools_of({tool.function.name: tool.function.parameters or ANY_ARGUMENTS for tool in described})
    if choice == "none":
        return ToolPlan(grammar_of(body), shows_tools=False)
    if not described:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if len(tools) < len(described):
        raise bad_request("two tools have the same name", "tools")
    single = body.parallel_tool_calls is False
    if choice == "auto":
        answer = grammar_of(body)
        if answer is not None:
            answer = replace(answer, instead=_calls(model, tools, single))
        return ToolPlan(answer, tools, single, warnings=() if model.is_form_known else (UNKNOWN_FORM,))
    # A response_format is for answers, and here is none.
    if grammar_of(body.model_copy(update={"response_format": None})) is not None:
        raise bad_request("a forced tool call cannot be combined with another constraint", "tool_choice")
    if choice == "required":
        return ToolPlan(Grammar(GrammarKind.EBNF, _calls(model, tools, single)), tools, single, calls_only=True)
    name = choice.function.name
    if name not in tools:
        raise bad_request(f"tool_choice names {name!r:.80}, which is not among the tools", "tool_choice")
    only = {name: tools[name]}
    grammar = Grammar(GrammarKind.EBNF, _calls(model, only, single=True))
    return ToolPlan(grammar, only, single=True, calls_only=True, forced=name)


def _calls(model: ServedModel, tools: Tools, single: bool) -> str:
    """The grammar of calls in the model's form; in channels, each of which ends the output, there is one."""
    return call_grammar(model.tool_form, tools, model.marks.spelled, single or model.tool_form.channels)
