"""Generate text in one line: `LLM("model directory or engine").generate("Once upon a time")`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from llmc.engine_format.manifest import is_engine
from llmc.errors import RequestError
from llmc.runtime.chat_template import ChatTemplate, TemplateRenderer, engine_template, named_template
from llmc.runtime.completion import Completion, Piece
from llmc.runtime.engine import Engine, load
from llmc.runtime.prompts import Prompt, Prompts
from llmc.runtime.sampling_params import SamplingParams

Message = Mapping[str, Any]
Conversation = Sequence[Message]


class LLM:
    """A model, ready to generate. Close it, or use it as a context manager. For one thread at a time.

    model: an engine directory, an Engine, or a Hugging Face directory, which is compiled when it is first used and
    found in the engine cache from then on. target and build_options: for that, as in llmc.compile. threads,
    kv_cache_bytes, kv_memory, prefix_cache, output_cache_bytes: as in llmc.load. chat_template: a Jinja file, or the
    name of a built-in template; default is the model's own. Raises LlmcError.
    """

    def __init__(
        self,
        model: str | Path | Engine,
        *,
        target: str = "cpu",
        threads: int | None = None,
        kv_cache_bytes: int | None = None,
        kv_memory: float | None = None,
        prefix_cache: bool = True,
        output_cache_bytes: int = 0,
        chat_template: str | None = None,
        **build_options: Any,
    ) -> None:
        if isinstance(model, Engine):
            self._engine = model
        else:
            path = Path(model)
            if not is_engine(path):
                from llmc.engine_cache import find_or_build_engine

                path = find_or_build_engine(path, target=target, **build_options)
            self._engine = load(
                path,
                threads=threads,
                kv_cache_bytes=kv_cache_bytes,
                kv_memory=kv_memory,
                prefix_cache=prefix_cache,
                output_cache_bytes=output_cache_bytes,
            )
        self._template: ChatTemplate | None = engine_template(self._engine.path)
        if chat_template is not None:
            self._template = named_template(chat_template, self._engine.path)
        self._renderer = TemplateRenderer(workers=1)

    @property
    def engine(self) -> Engine:
        """What does the work: its limits, its tokenizer, logits."""
        return self._engine

    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue one prompt or several (texts or lists of token ids); one completion a prompt, in order."""
        return self._engine.generate(prompts, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Piece, None, None]:
        """Continue one prompt piece by piece."""
        return self._engine.stream(prompt, params)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Completion]:
        """Answer one conversation or several: lists of {"role": ..., "content": ...}, as OpenAI has them."""
        conversations = [messages] if _is_conversation(messages) else list(messages)
        return self._engine.generate([self._prompt(each, tools) for each in conversations], params)

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Generator[Piece, None, None]:
        """Answer one conversation piece by piece."""
        return self._engine.stream(self._prompt(messages, tools), params)

    def close(self) -> None:
        """Free the engine."""
        self._renderer.close()
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prompt(self, messages: Any, tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """The conversation as tokens; the template writes the special tokens itself."""
        if self._template is None:
            raise RequestError(
                "the model came without a chat template",
                at=self._engine.path,
                fix='give one: LLM(model, chat_template="plain"), or use generate',
            )
        if not _is_conversation(messages):
            raise RequestError(
                f"a conversation is a list of messages, not {messages!r:.80}",
                at="messages",
                fix='give [{"role": "user", "content": "..."}], or a list of such lists',
            )
        text = self._renderer.render(self._template, messages, tools=tools)
        return self._engine.tokenizer.encode(text, add_special_tokens=False)


def _is_conversation(messages: Any) -> bool:
    if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Mapping):
        return False
    return all(isinstance(message, Mapping) for message in messages)
