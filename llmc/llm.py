"""Generate text in one line: `LLM("model directory or engine").generate("Once upon a time")`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from inspect import Signature
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from llmc.engine_argument import check_follows, engine_of
from llmc.engine_format.path_argument import path_argument
from llmc.errors import OptionError
from llmc.keywords import expanded, shows_keywords
from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.runtime.progress import Progress
from llmc.runtime.requests.completion import Completion, Piece
from llmc.runtime.sampling.sampling_keywords import SamplingKeywords, sampling_defaults
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.text.conversation import Conversation
from llmc.runtime.text.prompts import Prompt, Prompts

if TYPE_CHECKING:
    from llmc.options import BuildKeywords


class _Signature:
    """With the build options in place of `**`, made when somebody looks: their defaults take a while to import."""

    def __get__(self, instance: object, owner: type) -> Signature:
        from llmc.options import BuildKeywords, build_defaults

        shown = expanded(owner.__init__, BuildKeywords, build_defaults())  # type: ignore[misc]
        return shown.replace(parameters=list(shown.parameters.values())[1:])


class LLM:
    """A model, ready to generate, for any number of threads. Close it, or use it as a context manager.

    model: an engine directory, an Engine, or a Hugging Face directory, which is compiled when it is first used and
    found in the engine cache from then on. target and build_options: for that, as in llmc.compile; an engine that was
    not built so is refused. threads, kv_cache_bytes, kv_memory, prefix_cache, output_cache_bytes, speculation: as in
    llmc.load, so not for an Engine, which is loaded. chat_template: a template's text, a Jinja file, or the name of a
    built-in template; default is the model's own. Raises LlmcError.
    """

    __signature__ = _Signature()

    def __init__(
        self,
        model: str | Path | Engine,
        *,
        target: str | None = None,
        threads: int | None = None,
        kv_cache_bytes: int | None = None,
        kv_memory: float | None = None,
        prefix_cache: bool = True,
        output_cache_bytes: int = 0,
        speculation: str | Mapping[str, object] | None = None,
        chat_template: str | None = None,
        **build_options: Unpack[BuildKeywords],
    ) -> None:
        if isinstance(model, Engine):
            self._engine = model
            _refuse_load_options(threads, kv_cache_bytes, kv_memory, prefix_cache, output_cache_bytes, speculation)
            check_follows(model.path, target, build_options)
        else:
            self._engine = load(
                engine_of(path_argument("model", model), target=target, **build_options),
                threads=threads,
                kv_cache_bytes=kv_cache_bytes,
                kv_memory=kv_memory,
                prefix_cache=prefix_cache,
                output_cache_bytes=output_cache_bytes,
                speculation=speculation,
            )
        self._chat_template = chat_template
        if chat_template is not None:
            self._engine.conversations.template(chat_template)

    @property
    def engine(self) -> Engine:
        """What does the work: its limits, its tokenizer, logits."""
        return self._engine

    @shows_keywords(SamplingKeywords, sampling_defaults())
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Completion]:
        """Continue one prompt or several; one completion a prompt, in order. Arguments as in Engine.generate."""
        return self._engine.generate(prompts, params, progress=progress, **sampling)

    @shows_keywords(SamplingKeywords, sampling_defaults())
    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Unpack[SamplingKeywords]
    ) -> Generator[Piece, None, None]:
        """Continue one prompt piece by piece."""
        return self._engine.stream(prompt, params, **sampling)

    @shows_keywords(SamplingKeywords, sampling_defaults())
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Progress = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Completion]:
        """Answer one conversation or several: lists of {"role": ..., "content": ...}. Arguments as in Engine.chat."""
        return self._engine.chat(
            messages,
            params,
            tools=tools,
            chat_template=self._chat_template if chat_template is None else chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            progress=progress,
            **sampling,
        )

    @shows_keywords(SamplingKeywords, sampling_defaults())
    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Generator[Piece, None, None]:
        """Answer one conversation piece by piece. Arguments as in Engine.chat."""
        return self._engine.stream_chat(
            messages,
            params,
            tools=tools,
            chat_template=self._chat_template if chat_template is None else chat_template,
            chat_template_kwargs=chat_template_kwargs,
            **sampling,
        )

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LLM on {self._engine!r}>"


def _refuse_load_options(
    threads: int | None,
    kv_cache_bytes: int | None,
    kv_memory: float | None,
    prefix_cache: bool,
    output_cache_bytes: int,
    speculation: str | Mapping[str, object] | None,
) -> None:
    given = {
        "threads": threads is not None,
        "kv_cache_bytes": kv_cache_bytes is not None,
        "kv_memory": kv_memory is not None,
        "prefix_cache": not prefix_cache,
        "output_cache_bytes": bool(output_cache_bytes),
        "speculation": speculation is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise OptionError(
                f"{name} came beside an engine that is loaded already",
                at=name,
                fix=f"give it to llmc.load, or give the engine's directory: LLM(engine.path, {name}=…)",
            )
