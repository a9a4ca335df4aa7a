"""Chat messages to a prompt, by a Jinja template, rendered in a process that can be killed.

A template is a program from an untrusted checkpoint. It runs in Jinja's sandbox, in a worker with a limit on
its memory and no files to write; one that does not answer in time is killed with its worker.
"""

import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llmc.errors import LoadWarning, RequestError, UnavailableError
from llmc.processes.worker_process import WorkerError, WorkerProcess
from llmc.runtime.text.chat_template import ChatTemplate

WORKER = "llmc.runtime.text.chat_template_worker"
SECONDS = 1.5
PATIENCE_SECONDS = 30.0
MEMORY_BYTES = 256 << 20
MOST_CHARACTERS = 8 << 20
# Some fifty renderings of small conversations.
FIT_SECONDS = 10.0
# Parts that a warning names; further ones mostly follow from the first.
_TOLD = 3
# With less time left a template that has waited is not begun.
_SHORTEST_RUN = 0.05


@dataclass(frozen=True)
class TemplateInput:
    """The input of a prompt. messages, tools: as OpenAI's API has them. continue_final_message: the prompt
    ends inside the last message, for the model to continue it. extra: other variables of the template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TemplateFit:
    """How a template, or several of a model, take conversations. lacks: the parts that no form shows, in words.
    describes_tools: the template has no place for tools, and a system message describes them instead."""

    lacks: tuple[str, ...]
    describes_tools: bool


@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation rendered as a prompt. warnings: Changes that the caller may not expect."""

    text: str
    warnings: tuple[str, ...] = ()


class TemplateRenderer:
    """Workers that render templates, at most `workers` at once; made on first use, and again after one was killed.

    seconds: time limit of a template. patience_seconds: time limit from a request's arrival to its prompt, including
    the wait for a worker, but not a worker's start. memory_bytes: limit of a worker's address space beyond Python's
    own. niceness: nice level of the workers, 0 to 19.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        seconds: float = SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        niceness: int = 0,
    ) -> None:
        self._seconds = seconds
        self._patience_seconds = patience_seconds
        self._memory_bytes = memory_bytes
        self._niceness = niceness
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._fitted: list[object] = []
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(workers)
        self._closed = False

    def warm(self) -> None:
        """Start a worker now, so that the first chat does not wait for it."""
        with self._free, suppress(RequestError):  # A failure is reported when a worker is needed.
            self._put_back(self._worker())

    def fit(self, template: ChatTemplate) -> TemplateFit:
        """Find the form in which a template takes conversations. Workers that start later find it before they render.

        Raises:
            RequestError: As `render`.
        """
        question = _question(template, None)
        answer = _checked(self._answer(question, time.monotonic() + self._patience_seconds, FIT_SECONDS))
        with self._lock:
            self._fitted.append(question)
        lacks: list[list[str]] = answer["lacks"]
        # One of several templates may show the parts that another lacks.
        shared = tuple(lack for lack in lacks[0] if all(lack in others for others in lacks[1:]))
        return TemplateFit(shared, all(answer["describes_tools"]))

    def render(self, template: ChatTemplate, given: TemplateInput, arrived: float | None = None) -> RenderedPrompt:
        """The prompt. Raises RequestError for a template that fails, takes too long or too much memory, or leaves out a
        part of the conversation.

        arrived: when the request did, on the clock of time.monotonic; default now. Raises UnavailableError if others
        have kept the workers busy for all of its time.
        """
        deadline = (time.monotonic() if arrived is None else arrived) + self._patience_seconds
        answer = _checked(self._answer(_question(template, given), deadline, self._seconds))
        return RenderedPrompt(str(answer["prompt"]), tuple(answer["warnings"]))

    def close(self) -> None:
        """End the workers; a template that is being rendered is an error then."""
        with self._lock:
            self._closed = True
            workers = [*self._idle, *self._busy]
            self._idle.clear()
        for worker in workers:
            worker.kill()

    def _answer(self, question: object, deadline: float, seconds: float) -> dict[str, Any]:
        """deadline: until which it may wait, and be answered. seconds: that the answer may take."""
        if not self._free.acquire(blocking=False):
            if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise _busy()
            if deadline - time.monotonic() < min(seconds, _SHORTEST_RUN):
                self._free.release()
                raise _busy()
        try:
            begun = time.monotonic()
            worker = self._worker()
            deadline += time.monotonic() - begun
            with self._lock:
                self._busy.add(worker)
                if self._closed:
                    worker.kill()
            try:
                answer = worker.ask(question, max(0.0, min(seconds, deadline - time.monotonic())))
            except WorkerError as error:
                worker.kill()
                raise _failure(str(error)) from None
            except BaseException:
                worker.kill()
                raise
            finally:
                with self._lock:
                    self._busy.discard(worker)
            self._put_back(worker)
        finally:
            self._free.release()
        return answer

    def _worker(self) -> WorkerProcess:
        """An idle one, or a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            fitted = list(self._fitted)
        limits = (self._memory_bytes, MOST_CHARACTERS, self._niceness)
        try:
            worker = WorkerProcess(WORKER, tuple(map(str, limits)))
            try:
                for question in fitted:
                    worker.ask(question, FIT_SECONDS)
            except BaseException:
                worker.kill()
                raise
            return worker
        except WorkerError as error:
            raise UnavailableError(
                f"the process that renders chat templates is not ready: {error}", at="messages", fix="try again later"
            ) from None

    def _put_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.kill()


def warn_of_template(fit: Callable[[], TemplateFit]) -> TemplateFit | None:
    """Warn about parts that a template does not show, or that it cannot be used. fit: as TemplateRenderer.fit.

    Returns:
        The fit; None for a template that cannot be used.
    """
    try:
        template_fit = fit()
    except RequestError as error:
        warnings.warn(f"the chat template cannot be used: {error.problem}", LoadWarning, stacklevel=3)
        return None
    if template_fit.lacks:
        more = f" and {len(template_fit.lacks) - _TOLD} more" if len(template_fit.lacks) > _TOLD else ""
        parts = ", ".join(template_fit.lacks[:_TOLD]) + more
        warnings.warn(
            f"the chat template does not show {parts}: requests with that are refused", LoadWarning, stacklevel=3
        )
    return template_fit


def _question(template: ChatTemplate, given: TemplateInput | None) -> object:
    """A worker's question: for a prompt, or without a conversation for the parts that the templates lack."""
    tokens = json.dumps(dict(template.special_tokens), sort_keys=True)
    if given is None:
        return {"sources": template.sources(False), "special_tokens": tokens, "messages": None}
    return {
        "sources": template.sources(bool(given.tools)),
        "special_tokens": tokens,
        "variables": {"add_generation_prompt": given.add_generation_prompt, **(given.extra or {})},
        "messages": list(given.messages),
        "tools": list(given.tools) if given.tools else None,
        "continue": given.continue_final_message,
        "call_example": template.call_example,
    }


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" not in answer:
        return answer
    raise RequestError(
        f"the chat template {answer['error']}",
        at="messages",
        fix="check that the model's template supports the messages' roles, order and content",
    )


def _busy() -> UnavailableError:
    return UnavailableError("too many chat templates are being rendered", at="messages", fix="try again later")


def _failure(reason: str) -> RequestError:
    return RequestError(
        f"the chat template could not be rendered: {reason}",
        at="messages",
        fix="send fewer or shorter messages, or use another template",
    )
