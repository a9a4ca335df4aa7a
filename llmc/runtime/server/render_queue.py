"""Renders chat templates for asyncio in separate threads, with a limit on the number that wait."""

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from llmc.errors import UnavailableError
from llmc.runtime.text.chat_template import ChatTemplate
from llmc.runtime.text.template_renderer import SECONDS, RenderedPrompt, TemplateFit, TemplateInput, TemplateRenderer

_WORKERS = 2


class RenderQueue:
    """A renderer with its waiting requests. most_waiting: beyond this number, a request gets UnavailableError at once.
    pending: number of requests that are rendered or wait.

    Its threads are dedicated: while they wait for a slow template, everything else continues.
    """

    def __init__(self, renderer: TemplateRenderer, threads: int, most_waiting: int) -> None:
        self._renderer = renderer
        self._threads = ThreadPoolExecutor(threads, "llmc-template")
        self._most = threads + most_waiting
        self.pending = 0
        self._lock = threading.Lock()

    @staticmethod
    def of_engine() -> "RenderQueue":
        """Return a queue for the template of the engine, or the one with which the server was started."""
        return RenderQueue(TemplateRenderer(workers=_WORKERS), _WORKERS, most_waiting=4096)

    @staticmethod
    def of_requests() -> "RenderQueue":
        """Return a queue for templates in requests: they are rendered after all others, and their queue is short."""
        renderer = TemplateRenderer(workers=_WORKERS, patience_seconds=SECONDS, niceness=19)
        return RenderQueue(renderer, _WORKERS, most_waiting=16)

    def warm(self) -> None:
        """Start a worker now, so that the first chat does not wait for it."""
        self._renderer.warm()

    def fit(self, template: ChatTemplate) -> Future[TemplateFit]:
        """See TemplateRenderer; in a thread."""
        return self._threads.submit(self._renderer.fit, template)

    async def render(self, template: ChatTemplate, given: TemplateInput) -> RenderedPrompt:
        """See TemplateRenderer; the request has arrived now. Raises what it raises, and UnavailableError when full."""
        with self._lock:
            if self.pending >= self._most:
                raise UnavailableError(
                    f"{self.pending} chat templates wait to be rendered", at="messages", fix="try again later"
                )
            self.pending += 1
        rendered = self._threads.submit(self._renderer.render, template, given, time.monotonic())
        rendered.add_done_callback(self._done)
        return await asyncio.wrap_future(rendered)

    def close(self) -> None:
        """End the workers; waiting requests get an error."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._renderer.close()

    def _done(self, rendered: Future[RenderedPrompt]) -> None:
        with self._lock:
            self.pending -= 1
