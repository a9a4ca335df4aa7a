"""Find the form in which a chat template takes conversations: by rendering small ones whose every word is known.

A form fits if each text, call and tool of a conversation is in the prompt, once, and no value is written as None.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, takewhile
from typing import Any

from llmc.runtime.text import form_probes as probes
from llmc.runtime.text.conversation_form import Absent, Arguments, Calls, ConversationForm, Ids, Systems, Tools
from llmc.runtime.text.form_probes import Probe
from llmc.runtime.text.formed_conversation import formed
from llmc.runtime.text.normal_messages import Json, normal_messages
from llmc.runtime.text.tool_text import call_style

# Makes a prompt of the variables of a template. Raises anything.
Render = Callable[[Mapping[str, Any]], str]
Change = Callable[[ConversationForm], ConversationForm]
# The variable for tools of most templates, and SmolLM 3's.
_TOOL_NAMES = ("tools", "xml_tools")


@dataclass(frozen=True)
class Fit:
    """The form of conversations that a template takes. form: the best there is. lacks: what of a conversation no form
    renders, in words."""

    form: ConversationForm
    lacks: tuple[str, ...]


@dataclass(frozen=True)
class _Step:
    """Alternatives, the best first, and the probes that they have to pass; if none does, the one that passes most."""

    probes: tuple[Probe, ...]
    changes: tuple[Change, ...]


def fit(source: str, render: Render, end_token: str) -> Fit:
    """Find the form of a template.

    Args:
        source: The template's text.
        render: Makes a prompt with it.
        end_token: The token that ends a message, as text; may be empty.
    """
    form = ConversationForm(call_style=call_style(source))
    for step in _steps(source):
        form = _chosen(step, form, render)
        if step.probes == (probes.USER,) and not passes(probes.USER, form, render):
            return Fit(form, (probes.USER.shows,))
    if form.tools is Tools.DESCRIBED and form.calls is not Calls.AS_TEXT:
        form = replace(form, call_example=_call_example(form, render, end_token))
    lacks = [probe.shows for probe in probes.ALL if not passes(probe, form, render)]
    return Fit(form, tuple(lacks))


def passes(probe: Probe, form: ConversationForm, render: Render) -> bool:
    """Whether the prompt of a probe contains all its parts once, and nothing in place of absent parts."""
    prompt = _prompt(probe.messages, probe.tools, form, render)
    if prompt is None or not probe.is_shown(prompt):
        return False
    if probe.complete is None:
        return True
    # The template's own words, which may have None among them, are in both.
    complete = _prompt(probe.complete, probe.complete_tools, form, render)
    return complete is not None and all(prompt.count(word) <= complete.count(word) for word in ("None", "True"))


def _chosen(step: _Step, form: ConversationForm, render: Render) -> ConversationForm:
    best, most = form, -1
    for change in step.changes:
        changed = change(form)
        passed = sum(passes(probe, changed, render) for probe in step.probes)
        if passed == len(step.probes):
            return changed
        if passed > most:
            best, most = changed, passed
    return best


def _prompt(
    messages: Sequence[Json],
    tools: Sequence[Json] | None,
    form: ConversationForm,
    render: Render,
    *,
    begins_answer: bool = True,
) -> str | None:
    variables = {**formed(normal_messages(messages), tools, form), "add_generation_prompt": begins_answer}
    try:
        return render(variables)
    except Exception:  # A template may raise any exception, which means that it expects another form.
        return None


def _call_example(form: ConversationForm, render: Render, end_token: str) -> str | None:
    """The template's form of a call: the text after the beginning of an answer, without the end of any answer."""
    user, call, answer = probes.EXAMPLE
    begun = _prompt((user,), None, form, render)
    called = _prompt((user, call), None, form, render, begins_answer=False)
    answered = _prompt((user, answer), None, form, render, begins_answer=False)
    if begun is None or called is None or answered is None:
        return None
    start = _common(begun, called)
    # Two tags that differ have their first character in common.
    start -= begun[:start].endswith(("<", "["))
    end = len(called) - _common(called[::-1], answered[::-1])
    # And their last.
    rest = re.match(r"[^<>]*>", called[end:])
    example = called[start : end + (0 if rest is None else rest.end())]
    example = (example.split(end_token)[0] if end_token else example).strip()
    return example if all(word in example for word in probes.EXAMPLE_WORDS) else None


def _common(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _set(**fields: Any) -> Change:
    return partial(replace, **fields)


def _parts(role: str, **fields: Any) -> Change:
    return lambda form: replace(form, parts=form.parts | {role}, **fields)


def _steps(source: str) -> Iterable[_Step]:
    """Yield the probes from texts to calls: later ones need the results of earlier ones. source: the source of the
    template."""
    lists = _set(lists_no_tools=True), _parts("user", lists_no_tools=True)
    yield _Step((probes.USER,), (_set(), _parts("user"), *lists))
    yield _Step((probes.TURNS,), (_set(), _parts("assistant")))
    yield _Step((probes.BLANK,), (_set(), _set(blanks=False)))
    yield _Step(probes.ORDERS, (_set(), _set(alternates=True)))
    yield _Step(probes.SYSTEMS, tuple(_system_changes("developer" in source)))
    yield _Step(probes.TOOLS, tuple(_tool_changes(source)))
    yield _Step(probes.CALLS, tuple(_call_changes()))
    yield _Step((probes.CALL_WITHOUT_TOOLS,), (_set(), _set(calls_need_tools=True)))
    yield _Step((probes.SEVERAL_CALLS,), (_set(), _set(calls=Calls.ONE_EACH), _set(calls=Calls.AS_TEXT)))
    yield _Step(probes.TEXTS_AND_CALLS, (_set(), _set(calls_with_text=False), _set(calls=Calls.AS_TEXT)))
    yield _Step((probes.USER_AFTER_RESULT,), (_set(), _set(alternates=True)))
    yield _Step((probes.RAW_ARGUMENTS,), (_set(), _set(raw_arguments=False)))
    thoughts = ("reasoning_content", "reasoning", "thinking", "parts")
    yield _Step((probes.THOUGHT,), tuple(_set(thought=name) for name in thoughts))
    yield _Step((probes.TEXT_THOUGHT_AND_CALL,), (_set(), _set(thought_with_text=False)))


def _system_changes(knows_developer: bool) -> Iterable[Change]:
    for systems in Systems:
        for developer in (True, False) if knows_developer and systems is Systems.ANYWHERE else (False,):
            yield _set(systems=systems, developer=developer)
            yield _parts("system", systems=systems, developer=developer)


def _tool_changes(source: str) -> Iterable[Change]:
    names = [name for name in _TOOL_NAMES if name in source]
    for name, tools, fills in product(names, (Tools.WHOLE, Tools.FUNCTIONS), (False, True)):
        yield _set(tools=tools, fills_tools=fills, tools_name=name)
    yield _set(tools=Tools.DESCRIBED)


def _call_changes() -> Iterable[Change]:
    changes: tuple[Callable[..., Change], ...] = (_set, partial(_parts, "tool"))
    for ids, arguments, absent, change in product(Ids, Arguments, Absent, changes):
        yield change(ids=ids, arguments=arguments, absent=absent)
    yield _set(calls=Calls.AS_TEXT)
    yield _parts("tool", calls=Calls.AS_TEXT)
    yield _set(calls=Calls.AS_TEXT, results=False)
