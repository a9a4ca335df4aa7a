"""Server-sent events with a name each, as /v1/responses streams them; the last one has the reason why it ended."""

import json
from collections.abc import AsyncGenerator, Callable

from starlette.types import Receive, Scope, Send

from llmc.runtime.server.errors import ApiError, end_stream_with
from llmc.runtime.server.outputs import Event, EventStream


class TypedEventStream(EventStream):
    """Each event is named after its `type`, and no [DONE] follows. fail: the last event where an error cuts it off."""

    ending = b""

    def __init__(self, events: AsyncGenerator[Event, None], fail: Callable[[ApiError], Event]) -> None:
        super().__init__(events)
        self._fail = fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end_stream_with(scope, lambda error: self.encode(self._fail(error)))
        await super().__call__(scope, receive, send)

    def encode(self, event: Event) -> bytes:
        """The event's name and its JSON."""
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        return f"event: {event['type']}\ndata: ".encode() + data + b"\n\n"
