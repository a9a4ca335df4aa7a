"""The requests in flight in the loop thread of the asyncio engine, and the outputs sent to their clients."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from llmc.errors import RequestError
from llmc.runtime.async_client import Client, deliver, last_news, news_of, view
from llmc.runtime.engine_stats import RequestView
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.boundary import attempt
from llmc.runtime.requests.request import Origin, Request
from llmc.runtime.text.output_stream import News, OutputStream


class ClientsInFlight:
    """Changed by the loop's thread only. prompt_tokens, generation_tokens: tokens read and generated. finished: number
    of finished requests by reason."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self._clients: dict[str, Client] = {}
        self._owners: dict[Origin, Client] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, News]]] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def views(self, now: float) -> list[RequestView]:
        """A view per client, in order of arrival. Callable from any thread."""
        return [view(client, now) for client in list(self._clients.values())]

    def add(self, client: Client, loop: StepLoop) -> None:
        """Put a request into the loop, unless one of its name is in flight."""
        request_id = client.request.request_id
        if request_id in self._clients:
            error = RequestError(f"a request {request_id!r} is in flight", at="request_id")
            self._post(client, client.news(error=error))
            return
        self._clients[request_id] = client
        self._owners[client.origin] = client
        loop.add(client.first)

    def abort(self, request_id: str, loop: StepLoop) -> None:
        """End a request with its current output; an unknown one is ignored."""
        client = self._clients.get(request_id)
        if client is not None:
            self.end(client, loop, attempt(client.job.stop, "abort"))

    def stop_all(self, loop: StepLoop) -> None:
        """End every request with its current output."""
        for request_id in list(self._clients):
            self.abort(request_id, loop)

    def fail_all(self, error: RequestError, loop: StepLoop) -> int:
        """End every request with an error. Returns how many there were."""
        clients = list(self._clients.values())
        for client in clients:
            self.end(client, loop, error)
        return len(clients)

    def tell(self, requests: Iterable[Request], loop: StepLoop) -> None:
        """These sequences had a part in a step, or have expired: tell their clients of new tokens, or of the end."""
        now = time.monotonic()
        for request in requests:
            client = self._owners.get(request.origin)
            if client is not None:
                self._tell(client, request, now, loop)

    def _tell(self, client: Client, request: Request, now: float, loop: StepLoop) -> None:
        if client.first_token is None:
            self._begin(client, now)
        report = attempt(news_of, client, request)
        if isinstance(report, RequestError):
            return self.end(client, loop, report)
        self.generation_tokens += report.tokens
        if report.is_last:
            return self.end(client, loop)
        if report.news is not None:
            self._post(client, report.news)

    def end(self, client: Client, loop: StepLoop, error: RequestError | None = None) -> None:
        """Take a request out of the loop and tell its client. error: why it cannot go on, if it has not ended."""
        now = time.monotonic()
        del self._clients[client.request.request_id]
        del self._owners[client.origin]
        loop.drop(client.origin)
        if client.first_token is None:
            self._begin(client, now)
        last = attempt(last_news, client, now) if error is None else error
        if isinstance(last, RequestError):
            self.finished["error"] += 1
            return self._post(client, client.news(error=last))
        self.generation_tokens += last.tokens
        self.finished[last.reason] += 1
        self._post(client, last.news)

    def _begin(self, client: Client, now: float) -> None:
        client.first_token = now
        self.prompt_tokens += len(client.request.prompt_token_ids)

    def _post(self, client: Client, news: News) -> None:
        self._outbox.setdefault(client.stream.event_loop, []).append((client.stream, news))

    def send(self) -> None:
        """Hand the news of a step to the clients: waking an event loop is expensive, so once for all of them."""
        outbox, self._outbox = self._outbox, {}
        for event_loop, news in outbox.items():
            # A client may have closed its event loop at any moment; its outputs are then dropped.
            with suppress(RuntimeError):
                event_loop.call_soon_threadsafe(deliver, news)
