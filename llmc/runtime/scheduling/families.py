"""Which sequences serve the same client's request: they end together when it is dropped, or when one of them fails."""

from llmc.errors import RequestError
from llmc.runtime.requests.request import Origin, Request


class Families:
    """The sequences that the scheduler knows, by the client's request."""

    def __init__(self) -> None:
        self._members: dict[Origin, dict[Request, None]] = {}
        self._failed: list[Origin] = []

    def add(self, request: Request) -> None:
        """The scheduler knows it now."""
        self._members.setdefault(request.origin, {})[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request; an unknown one is ignored."""
        members = self._members.get(request.origin)
        if members is not None:
            members.pop(request, None)
            if not members:
                del self._members[request.origin]

    def members(self, origin: Origin) -> list[Request]:
        """The sequences of a client's request."""
        return list(self._members.get(origin, ()))

    def fail(self, request: Request, error: RequestError) -> None:
        """End a request, and all of its client's request, with an error."""
        for member in {request: None, **self._members.get(request.origin, {})}:
            member.fail(error)
        self._failed.append(request.origin)

    def take_failed(self) -> list[Request]:
        """The members of families that have failed since the last call."""
        failed, self._failed = self._failed, []
        return [request for origin in failed for request in self.members(origin)]
