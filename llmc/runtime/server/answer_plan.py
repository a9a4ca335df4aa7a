"""How a chat request's output is constrained and read: tools, then what the model thinks before its answer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from llmc.runtime.grammar.grammar import Grammar, Preamble
from llmc.runtime.server.call_identity import new_identity
from llmc.runtime.server.chat_deltas import ChatDeltas, ContentDeltas, EventDeltas, ThinkingDeltas, WithoutEnd
from llmc.runtime.server.output_reader import OutputReader
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.thinking import Thinking, ThinkingReader, ThinkTags, is_begun
from llmc.runtime.server.tool_calls.call_reader import CallReader
from llmc.runtime.server.tool_calls.channels import FINAL, ChannelReader
from llmc.runtime.server.tool_plan import ToolPlan


@dataclass(frozen=True)
class AnswerPlan:
    """How a chat answer is constrained and read. grammar: the grammar of the output, None for no constraint. reader:
    makes the deltas of a choice.

    keeps_special: the output's text has its special tokens, because some of them mark calls or thoughts. thinking:
    None for a model that does not think.
    """

    grammar: Grammar | None
    reader: Callable[[], ChatDeltas]
    keeps_special: bool
    thinking: Thinking | None


def answer_plan(model: ServedModel, body: ChatRequest, tools: ToolPlan, prompt: str) -> AnswerPlan:
    """Plan how to read a chat answer: its grammar, its reader, and its thinking.

    prompt: the template's text, which may have begun the thinking.
    """
    thinking = _thinking(model, body, prompt)
    grammar = tools.grammar
    if grammar is not None and thinking is not None:
        grammar = replace(grammar, preamble=_preamble(model, thinking, tools))
    plan = AnswerPlan(grammar, _reader(model, body, tools, thinking, prompt), _keeps_special(model, tools), thinking)
    if not plan.keeps_special or not body.skip_special_tokens:
        return plan
    ends = tuple(model.texts.text(token) for token in model.engine.engine.info.eos_token_ids)
    return replace(plan, reader=lambda: WithoutEnd(ends, plan.reader()))


def _reader(
    model: ServedModel, body: ChatRequest, tools: ToolPlan, thinking: Thinking | None, prompt: str
) -> Callable[[], ChatDeltas]:
    form, shows = model.tool_form, body.include_reasoning

    def events(reader: OutputReader) -> ChatDeltas:
        identity = new_identity(form)
        return EventDeltas(
            reader, identity, single=tools.single, shows_thoughts=shows, forced=tools.forced, marks=form.marks
        )

    def answer() -> ChatDeltas:
        if form.channels:
            return events(ChannelReader(tools.tools, prompt))
        return events(CallReader(form, tools.tools)) if tools.tools else ContentDeltas()

    if thinking is None or form.channels:
        return answer
    return lambda: ThinkingDeltas(ThinkingReader(thinking), answer(), shows)


def _keeps_special(model: ServedModel, tools: ToolPlan) -> bool:
    marks = set(model.tool_form.marks) if tools.tools or model.tool_form.channels else set[str]()
    if model.think_tags is not None:
        marks |= {model.think_tags.opening, model.think_tags.closing, *(model.think_tags.answer or ())}
    return model.marks.are_special(marks)


def _thinking(model: ServedModel, body: ChatRequest, prompt: str) -> Thinking | None:
    form, tags = model.tool_form, model.think_tags
    if tags is None:
        return None
    interrupts = tuple(section.opening for section in form.sections) if form.ends_thoughts else ()
    return Thinking(tags, begins_inside(body, tags, prompt), interrupts)


def begins_inside(body: ChatRequest, tags: ThinkTags, prompt: str) -> bool:
    """Whether the output's first token is a thought."""
    if body.continue_final_message:
        return is_begun(tags, prompt, body.messages[-1].text())
    # Otherwise the prompt ends with the last message's text, or that is cut off.
    is_whole = body.truncate_prompt_tokens is None or body.truncation_side != "right"
    return body.add_generation_prompt and is_whole and is_begun(tags, prompt, None)


def _preamble(model: ServedModel, thinking: Thinking, tools: ToolPlan) -> Preamble:
    """The thinking as a grammar has it."""
    spelled, tags = model.marks.spelled, thinking.tags
    opening = None if thinking.begun else spelled(tags.opening)
    heading = spelled(FINAL) if model.tool_form.channels and not tools.calls_only else ()
    return Preamble(opening, spelled(tags.closing), tags.repeats, heading)
