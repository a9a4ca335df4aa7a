"""Responses that later requests may continue from: in memory, bounded in bytes and in age."""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmc.runtime.server.schemas.response_items import InputItem

# Bytes of an entry without its texts: objects and references to them, measured with sys.getsizeof on CPython 3.11.
_ENTRY_BYTES = 4096


@dataclass(frozen=True)
class StoredResponse:
    """A response that later requests may continue. response: as the client got it. input_items: what its request added.
    conversation: all items up to its end.

    size: the size of its texts, in bytes. tenant: whose key it was made with.
    """

    response: dict[str, Any]
    input_items: tuple[InputItem, ...]
    conversation: tuple[InputItem, ...]
    size: int
    tenant: str | None


class ResponseStore:
    """At most `max_bytes` of responses (0 keeps none), each for `seconds`; the one used longest ago goes first.

    replica: is part of the ids that it makes, so that a router knows whose a response is. now: a clock in seconds.
    """

    def __init__(
        self, max_bytes: int, seconds: float, replica: int = 0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._replica = replica
        self._now = now
        self._kept: OrderedDict[str, tuple[StoredResponse, float]] = OrderedDict()
        self._bytes = 0

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything."""
        return self._max_bytes > 0

    def new_id(self) -> str:
        """An unguessable id for a response."""
        return f"resp_{self._replica:02x}{uuid.uuid4().hex}"

    def get(self, identity: str, tenant: str | None) -> StoredResponse | None:
        """Return that response, if it is the tenant's and not too old."""
        entry = self._kept.get(identity)
        if entry is None or entry[0].tenant != tenant:
            return None
        if entry[1] < self._now():
            self._drop(identity)
            return None
        self._kept.move_to_end(identity)
        return entry[0]

    def put(self, stored: StoredResponse) -> None:
        """Keep a response under its id, unless it is larger than the whole store."""
        size = _ENTRY_BYTES + stored.size
        if size > self._max_bytes:
            return
        self._kept[stored.response["id"]] = stored, self._now() + self._seconds
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def delete(self, identity: str, tenant: str | None) -> bool:
        """Delete a response; return whether it existed."""
        if self.get(identity, tenant) is None:
            return False
        self._drop(identity)
        return True

    def _drop(self, identity: str) -> None:
        stored, _ = self._kept.pop(identity)
        self._bytes -= _ENTRY_BYTES + stored.size


def replica_of(identity: str) -> int | None:
    """The replica that made a response's id; None if the text is not such an id."""
    digits = identity.removeprefix("resp_")
    if len(digits) != 34 or digits == identity:
        return None
    try:
        return int(digits[:2], 16)
    except ValueError:
        return None
