"""Chat messages to a prompt, by the model's Jinja template, rendered in a process that can be killed.

A template is a program that came with somebody's checkpoint. It runs in Jinja's sandbox, in a worker with a limit on
its memory and no files to write; one that does not answer in time is killed with its worker.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.engine_format import EngineFiles
from llmc.errors import OptionError, RequestError, UnavailableError
from llmc.processes.worker_process import WorkerError, WorkerProcess

WORKER = "llmc.runtime.text.chat_template_worker"
SECONDS = 1.5
PATIENCE_SECONDS = 30.0
MEMORY_BYTES = 256 << 20
OUTPUT_BYTES = 8 << 20
# With less time left a template that has waited is not begun.
_SHORTEST_RUN = 0.05

# For models that came without a template; named on the command line by the key.
BUILT_IN: Mapping[str, str] = {
    "plain": (
        "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text and the special tokens (bos_token, eos_token, …) that it may name."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TemplateInput:
    """What a template makes a prompt of. continue_final_message: the prompt ends inside the last message, for the model
    to go on with it. extra: other variables of the template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    extra: Mapping[str, Any] | None = None


def engine_template(engine: EngineFiles) -> ChatTemplate | None:
    """The template that came with the model (chat_template.jinja, else tokenizer_config.json), or None."""
    config = _tokenizer_config(engine)
    file = "tokenizer/chat_template.jinja"
    source = engine.text(file) if file in engine else _default_of(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, special_tokens(engine))


def named_template(name: str, engine: EngineFiles) -> ChatTemplate:
    """A template of BUILT_IN, or of a file. Raises OptionError if there is neither."""
    if name in BUILT_IN:
        return ChatTemplate(BUILT_IN[name], special_tokens(engine))
    try:
        return ChatTemplate(Path(name).read_text(encoding="utf-8"), special_tokens(engine))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise OptionError(
            f"the chat template cannot be read: {error}",
            at=f"chat_template={name!r:.120}",
            fix=f"name a Jinja file, or one of {', '.join(BUILT_IN)}",
        ) from None


def special_tokens(engine: EngineFiles) -> dict[str, str]:
    """The tokens that tokenizer_config.json names, such as bos_token, as text."""
    named = {name: value for name, value in _tokenizer_config(engine).items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


class TemplateRenderer:
    """Workers that render templates, at most `workers` at once; made on first use, and again after one was killed.

    seconds: that a template may run. patience_seconds: from a request's arrival until its prompt, with what it waits
    for a worker, but without what one takes to start. memory_bytes: of a worker's address space beyond Python's own.
    niceness: how far the workers stand back behind other processes, 0 to 19.
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
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(workers)
        self._closed = False

    def warm(self) -> None:
        """Start a worker now, so that the first chat does not wait for it."""
        with self._free, suppress(RequestError):  # Whoever needs one is told.
            self._put_back(self._worker())

    def render(self, template: ChatTemplate, given: TemplateInput, arrived: float | None = None) -> str:
        """The prompt. Raises RequestError for a template that fails, takes too long or too much memory.

        arrived: when the request did, on the clock of time.monotonic; default now. Raises UnavailableError if others
        have kept the workers busy for all of its time.
        """
        deadline = (time.monotonic() if arrived is None else arrived) + self._patience_seconds
        variables = {
            **template.special_tokens,
            "messages": list(given.messages),
            "tools": None if given.tools is None else list(given.tools),
            "documents": None,
            "add_generation_prompt": given.add_generation_prompt,
            **(given.extra or {}),
        }
        question = {"template": template.source, "variables": variables, "continue": given.continue_final_message}
        answer = self._answer(question, deadline)
        if "error" in answer:
            raise RequestError(
                f"the chat template fails: {answer['error']}",
                at="messages",
                fix="check the messages' roles, order and content against what the model's template takes",
            )
        return str(answer["prompt"])

    def close(self) -> None:
        """End the workers; a template that is being rendered is an error then."""
        with self._lock:
            self._closed = True
            workers = [*self._idle, *self._busy]
            self._idle.clear()
        for worker in workers:
            worker.kill()

    def _answer(self, question: object, deadline: float) -> dict[str, Any]:
        if not self._free.acquire(blocking=False):
            if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise _busy()
            if deadline - time.monotonic() < min(self._seconds, _SHORTEST_RUN):
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
                answer = worker.ask(question, max(0.0, min(self._seconds, deadline - time.monotonic())))
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
        limits = (self._memory_bytes, OUTPUT_BYTES, self._niceness)
        try:
            return WorkerProcess(WORKER, tuple(map(str, limits)))
        except WorkerError as error:
            raise UnavailableError(
                f"what renders chat templates is not ready: {error}", at="messages", fix="try again later"
            ) from None

    def _put_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.kill()


def _busy() -> UnavailableError:
    return UnavailableError("too many chat templates are being rendered", at="messages", fix="try again later")


def _failure(reason: str) -> RequestError:
    return RequestError(
        f"the chat template could not be rendered: {reason}",
        at="messages",
        fix="send fewer or shorter messages, or use another template",
    )


def _default_of(value: Any) -> str | None:
    """The template of tokenizer_config.json: a text, or a list of named ones of which `default` counts."""
    if isinstance(value, list):
        named = [each for each in value if isinstance(each, dict) and each.get("name") == "default"]
        value = named[-1].get("template") if named else None
    return value if isinstance(value, str) else None


def _tokenizer_config(engine: EngineFiles) -> dict[str, Any]:
    file = "tokenizer/tokenizer_config.json"
    config = engine.json(file) if file in engine else {}
    return config if isinstance(config, dict) else {}
