"""Generate text in one line: `LLM("model directory or engine").generate("Once upon a time")`."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from llmc.api.keywords import expanded
from llmc.engine_format.manifest import is_engine
from llmc.engine_format.path_argument import path_argument
from llmc.engines.engine_argument import check_follows, engine_of
from llmc.errors import OptionError
from llmc.frontends.open_model import local_model
from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.runtime.text_generator import TextGenerator

if TYPE_CHECKING:
    from llmc.options import BuildKeywords


class _Signature:
    """With the build options in place of `**`, made on first access: their defaults take a while to import."""

    def __get__(self, instance: object, owner: Any) -> Signature:
        from llmc.options import BuildKeywords, build_defaults

        shown = expanded(owner.__init__, BuildKeywords, build_defaults())
        return shown.replace(parameters=list(shown.parameters.values())[1:])


class LLM(TextGenerator):
    """A model that generates text. Close it, or use it as a context manager.

    It may be called from any number of threads.

    Args:
        model: An engine directory, an Engine, or a Hugging Face directory or hub name. A model is compiled at the first
            use and then found in the engine cache.
        target: As in `llmc.compile`. An existing engine for another target is an error.
        threads: As in `llmc.load`, and so are kv_cache_bytes, kv_memory, prefix_cache, state_cache_bytes,
            output_cache_bytes, kv_offloading_size, kv_offloading_dir and speculation. They are errors for an Engine,
            which is already loaded.
        chat_template: A template's text, a Jinja file, or the name of a built-in template; default the model's own.
        **build_options: The fields of llmc.options.BuildOptions. An existing engine that was built otherwise is an
            error, except that requests which name no kv_compression get the given one, if the engine can run it.

    Raises:
        LlmcError: As in `llmc.compile` and `llmc.load`.
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
        state_cache_bytes: int | None = None,
        output_cache_bytes: int = 0,
        kv_offloading_size: int | str | None = None,
        kv_offloading_dir: str | Path | None = None,
        speculation: str | Mapping[str, object] | None = None,
        chat_template: str | None = None,
        **build_options: Unpack[BuildKeywords],
    ) -> None:
        opening: dict[str, Any] = {
            "threads": threads,
            "kv_cache_bytes": kv_cache_bytes,
            "kv_memory": kv_memory,
            "prefix_cache": prefix_cache,
            "state_cache_bytes": state_cache_bytes,
            "output_cache_bytes": output_cache_bytes,
            "kv_offloading_size": kv_offloading_size,
            "kv_offloading_dir": kv_offloading_dir,
            "speculation": speculation,
        }
        if isinstance(model, Engine):
            self._engine, policy = model, build_options.pop("kv_compression", None)
            _refuse_opening(opening)
            check_follows(model.path, target, build_options)
            completer = model.completer if policy is None else model.completer.with_kv_compression(policy)
        else:
            place = local_model(model) if isinstance(model, str) else path_argument("model", model)
            if is_engine(place):
                opening["kv_compression"] = build_options.pop("kv_compression", None)
            self._engine = load(engine_of(place, target=target, **build_options), **opening)
            completer = self._engine.completer
        super().__init__(completer, self._engine.conversations, chat_template)
        if chat_template is not None:
            self._engine.conversations.template(chat_template)

    @property
    def engine(self) -> Engine:
        """The underlying engine, for its limits, tokenizer and logits."""
        return self._engine

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()

    def __repr__(self) -> str:
        return f"<LLM on {self._engine!r}>"


def _refuse_opening(options: Mapping[str, object]) -> None:
    defaults = signature(load).parameters
    for name, value in options.items():
        if value != defaults[name].default:
            raise OptionError(
                f"{name} was given with an engine that is already loaded",
                at=name,
                fix=f"give it to llmc.load, or give the engine's directory: LLM(engine.path, {name}=…)",
            )
