"""How a chat request's output is constrained and read: tools, then what the model thinks before its answer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from llmc.runtime.grammar.grammar import Grammar, Preamble
from llmc.runtime.server.chat_deltas import ChatDeltas, ThinkingDeltas, WithoutEnd
from llmc.runtime.server.schemas.chat import ChatRequest
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.thinking import Thinking, ThinkingReader, ThinkTags, is_begun
from llmc.runtime.server.tool_plan import ToolPlan


@dataclass(frozen=True)
class AnswerPlan:
    """grammar: what the output is held to, None for nothing. reader: makes the deltas of a choice.

    keeps_special: the output's text has its special tokens, because some of them mark calls or thoughts. thinking:
    None for a model that does not think.
    """

    grammar: Grammar | None
    reader: Callable[[], ChatDeltas]
    keeps_special: bool
    thinking: Thinking | None


def answer_plan(model: ServedModel, body: ChatRequest, tools: ToolPlan, prompt: str) -> AnswerPlan:
    """prompt: the template's text, which may have begun the thinking."""
    tags = model.think_tags
    if tags is None:
        plan = AnswerPlan(tools.grammar, tools.reader, tools.keeps_special, None)
    else:
        plan = _thinking_plan(model, body, tools, Thinking(tags, begins_inside(body, tags, prompt)))
    if not plan.keeps_special or not body.skip_special_tokens:
        return plan
    ends = tuple(model.texts.text(token) for token in model.engine.engine.info.eos_token_ids)
    return replace(plan, reader=lambda: WithoutEnd(ends, plan.reader()))


def _thinking_plan(model: ServedModel, body: ChatRequest, tools: ToolPlan, thinking: Thinking) -> AnswerPlan:
    def reader() -> ChatDeltas:
        return ThinkingDeltas(ThinkingReader(thinking), tools.reader(), body.include_reasoning)

    marked = model.texts.is_special(thinking.tags.closing) or model.texts.is_special(thinking.tags.opening)
    grammar = None if tools.grammar is None else replace(tools.grammar, preamble=preamble(model, thinking))
    return AnswerPlan(grammar, reader, tools.keeps_special or marked, thinking)


def begins_inside(body: ChatRequest, tags: ThinkTags, prompt: str) -> bool:
    """Whether the output's first token is a thought."""
    if body.continue_final_message:
        return is_begun(tags, prompt, body.messages[-1].text())
    # Otherwise the prompt's end is what the last message says, or is cut.
    is_whole = body.truncate_prompt_tokens is None or body.truncation_side != "right"
    return body.add_generation_prompt and is_whole and is_begun(tags, prompt, None)


def preamble(model: ServedModel, thinking: Thinking) -> Preamble:
    """The thinking as a grammar has it; special tokens are named by their ids."""

    def mark(tag: str) -> str | int:
        return model.engine.engine.tokenizer.encode(tag, add_special_tokens=False)[0] if special(tag) else tag

    special = model.texts.is_special
    tags = thinking.tags
    return Preamble(None if thinking.begun else mark(tags.opening), mark(tags.closing))
