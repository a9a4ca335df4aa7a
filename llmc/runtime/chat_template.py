"""Chat messages to a prompt, by the model's Jinja template, rendered in a process that can be killed.

A template is a program that came with somebody's checkpoint. It runs in Jinja's sandbox, in a worker with a limit on
its memory and no files to write; one that does not answer in time is killed with its worker.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.errors import EngineFormatError, OptionError, RequestError
from llmc.runtime.worker_process import WorkerError, WorkerProcess

WORKER = "llmc.runtime.chat_template_worker"
SECONDS = 1.5
MEMORY_BYTES = 256 << 20
OUTPUT_BYTES = 8 << 20

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

    @property
    def takes_tools(self) -> bool:
        """Whether the template does anything with tools."""
        return "tools" in self.source


def engine_template(engine: Path) -> ChatTemplate | None:
    """The template that came with the model (chat_template.jinja, else tokenizer_config.json), or None."""
    config = _tokenizer_config(engine)
    file = engine / "tokenizer" / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else _default_of(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, special_tokens(engine))


def named_template(name: str, engine: Path) -> ChatTemplate:
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


def special_tokens(engine: Path) -> dict[str, str]:
    """The tokens that tokenizer_config.json names, such as bos_token, as text."""
    found: dict[str, str] = {}
    for name, value in _tokenizer_config(engine).items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


class TemplateRenderer:
    """Workers that render templates, at most `workers` at once; made on first use, and again after one was killed.

    seconds: from the question to the answer. memory_bytes: of a worker's address space beyond Python's own.
    """

    def __init__(self, *, workers: int = 2, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._idle: list[WorkerProcess] = []
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(workers)
        self._closed = False

    def warm(self) -> None:
        """Start a worker now, so that the first chat does not wait for it."""
        with self._free:
            self._put_back(self._worker())

    def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises RequestError for a template that fails, takes too long or too much memory.

        continue_final_message: the prompt ends inside the last message, for the model to go on with it. extra: other
        variables of the template.
        """
        variables = {
            **template.special_tokens,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(extra or {}),
        }
        question = {"template": template.source, "variables": variables, "continue": continue_final_message}
        with self._free:
            worker = self._worker()
            try:
                answer = worker.ask(question, self._seconds)
            except WorkerError as error:
                worker.kill()
                raise _failure(str(error)) from None
            except BaseException:
                worker.kill()
                raise
            self._put_back(worker)
        if "error" in answer:
            raise RequestError(
                f"the chat template fails: {answer['error']}",
                at="messages",
                fix="check the messages' roles, order and content against what the model's template takes",
            )
        prompt: str = answer["prompt"]
        return prompt

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()

    def _worker(self) -> WorkerProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return WorkerProcess(WORKER, (str(self._memory_bytes), str(OUTPUT_BYTES)))
        except WorkerError as error:
            raise _failure(str(error)) from None

    def _put_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.kill()


def _failure(reason: str) -> RequestError:
    return RequestError(
        f"the chat template could not be rendered: {reason}",
        at="messages",
        fix="send fewer or shorter messages, or use another template",
    )


def _default_of(value: Any) -> str | None:
    """The template of tokenizer_config.json: a text, or a list of named ones of which `default` counts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {e.get("name"): e.get("template") for e in value if isinstance(e, dict)}
        default = named.get("default")
        return default if isinstance(default, str) else None
    return None


def _tokenizer_config(engine: Path) -> dict[str, Any]:
    file = engine / "tokenizer" / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineFormatError(f"the file is not JSON: {error}", at=file, fix="rebuild the engine") from None
    return config if isinstance(config, dict) else {}
