"""Events of an output, in order: thoughts, text, the beginnings of calls, and their arguments."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """A piece of the model's thoughts."""

    text: str


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call of a known function. identity: the id that the model gave it, if any."""

    name: str
    identity: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of the arguments of the call that began last."""

    text: str


Event = Thought | Text | CallBegun | CallArguments


def joined(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring pieces of one kind, and return the events."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, CallBegun):
            merged.append(event)
        elif last is not None and type(last) is type(event) and not isinstance(last, CallBegun):
            merged[-1] = type(event)(last.text + event.text)
        else:
            merged.append(event)
    return merged
