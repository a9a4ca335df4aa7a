"""Events of readers of calls."""

from collections.abc import Callable

from llmc.runtime.server.output_events import CallArguments, CallBegun, Event
from llmc.runtime.server.tool_calls.tools import Tools


class Calls:
    """Takes the calls that a reader finds. tools: those that may be called. say: told of each event."""

    def __init__(self, tools: Tools, say: Callable[[Event], None]) -> None:
        self.tools = tools
        self._say = say

    def begin(self, name: str, identity: str | None = None) -> None:
        """A call of a known function begins; its arguments follow."""
        self._say(CallBegun(name, identity))

    def arguments(self, text: str) -> None:
        """The next piece of the arguments' JSON."""
        if text:
            self._say(CallArguments(text))
