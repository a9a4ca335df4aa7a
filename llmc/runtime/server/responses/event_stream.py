"""Server-sent events with a name each, as /v1/responses streams them; the last one says how it ended."""

from __future__ import annotations

import json

from llmc.runtime.server.outputs import Event, EventStream


class TypedEventStream(EventStream):
    """Each event is named after its `type`, and no [DONE] follows."""

    ending = b""

    def encode(self, event: Event) -> bytes:
        """The event's name and its JSON."""
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        return f"event: {event['type']}\ndata: ".encode() + data + b"\n\n"
