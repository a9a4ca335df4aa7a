"""Serve an engine over HTTP until SIGTERM or Ctrl-C: load, listen, drain, close."""

import asyncio
import random
import socket
import threading
import warnings
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp
from uvicorn.config import LOG_LEVELS, LOGGING_CONFIG

from llmc.engine_format import engine_files
from llmc.errors import AdapterError, LoadWarning, OptionError
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.runtime.ranks.other_rank import work_for_first_rank
from llmc.runtime.server.app import create_app
from llmc.runtime.server.header_limit import limited_headers
from llmc.runtime.server.host_check import hosts_of
from llmc.runtime.server.lifecycle import Lifecycle
from llmc.runtime.server.listener import address_of, listen
from llmc.runtime.server.marks import MarkTexts
from llmc.runtime.server.model_forms import UNKNOWN_FORM, model_forms
from llmc.runtime.server.options import ServeOptions
from llmc.runtime.server.render_queue import RenderQueue
from llmc.runtime.server.request_metrics import RequestMetrics
from llmc.runtime.server.responses.store import ResponseStore
from llmc.runtime.server.sampling import SamplingDefaults, engine_defaults
from llmc.runtime.server.served_model import ServedModel
from llmc.runtime.server.throughput import LOGGER, log_throughput
from llmc.runtime.server.token_texts import TokenTexts
from llmc.runtime.server.tokenizing import Tokenizing
from llmc.runtime.text.template_renderer import warn_of_template

_HEADER_SECONDS = 1.5
_CLOSE_SECONDS = 5.0
# For clients to read that the engine has died.
_TOLD_SECONDS = 5.0


def serve(options: ServeOptions, listening: Callable[[str], None]) -> bool:
    """Serve until the process gets a signal to end. Returns whether every request was finished.

    listening: called with the address once requests are answered. Raises OptionError for an address that cannot be
    bound, the errors of `load`, and EngineFailureError when the engine has died and every client is notified.
    """
    work_for_first_rank(options.engine, options.threads)  # Before it would listen: only the first serves.
    with listen(options) as listener:
        registry = CollectorRegistry()
        model = open_model(options, registry)
        try:
            app = create_app(model, registry, options, hosts_of(options))
            server = DrainingServer(
                app,
                options,
                model.lifecycle,
                lambda: listening(address_of(listener, options)),
                partial(log_throughput, model.engine, f"replica {options.replica_index}" * options.behind_router),
            )
            model.engine.when_dead(server.end)
            with event_loop() as runner:
                runner.run(server.serve(sockets=[listener]))
            if model.engine.failure is not None:
                raise model.engine.failure
            return server.drained
        finally:
            close_model(model)


def open_model(options: ServeOptions, registry: CollectorRegistry) -> ServedModel:
    """Load the engine and start its loop. registry: gets the metrics of its requests."""
    files, forms = engine_files(options.engine), model_forms(options)
    defaults = engine_defaults(files) if options.generation_config == "auto" else SamplingDefaults()
    names = options.served_model_name or (options.engine.resolve().name.removesuffix(".llmc"),)
    renderer = RenderQueue.of_engine()
    fitting = None if forms.template is None else renderer.fit(forms.template)
    is_form_known = forms.tools.is_known
    try:
        engine = _load(options)
        load_adapters(engine, options, names)
        engine.wait_until_checked()
        if options.warm_up:
            engine.warm_up(progress=not options.behind_router)
        if fitting is not None:
            fit = warn_of_template(fitting.result)
            is_form_known = is_form_known or (fit is not None and fit.describes_tools)
        if not is_form_known:
            warnings.warn(UNKNOWN_FORM, LoadWarning, stacklevel=2)
    except BaseException:
        renderer.close()
        raise
    request_renderer = RenderQueue.of_requests() if options.trust_request_chat_template else None
    if request_renderer is not None:
        threading.Thread(target=request_renderer.warm, daemon=True).start()
    if engine.tokenizer.exists and engine.info.head is None:
        threading.Thread(target=engine.grammars.prepare, daemon=True).start()
    running = AsyncEngine(engine, restarts=options.engine_restarts)
    return ServedModel(
        engine=running,
        names=names,
        max_model_len=options.max_model_len or engine.limits.max_model_len,
        defaults=defaults,
        template=forms.template,
        tool_form=forms.tools.form,
        is_form_known=is_form_known,
        think_tags=forms.think_tags,
        renderer=renderer,
        texts=TokenTexts(engine.tokenizer),
        tokenizing=Tokenizing(engine.tokenizer),
        marks=MarkTexts(engine.tokenizer),
        metrics=RequestMetrics(registry, names[0]),
        lifecycle=Lifecycle(lambda: running.takes_requests),
        responses=ResponseStore(
            options.response_store_bytes, options.response_store_seconds, replica=options.replica_index
        ),
        seeds=None if options.seed is None else random.Random(options.seed),
        request_renderer=request_renderer,
        max_waiting=options.max_waiting,
        stall_seconds=options.stall_seconds,
        warns_of_unknown=options.unknown_fields == "warn",
        allows_lora_updates=options.allow_lora_updates and not options.behind_router,
    )


def load_adapters(engine: Engine, options: ServeOptions, names: Sequence[str]) -> None:
    """Load the adapters of the options. names: the model's names, which adapters must not have. Raises AdapterError."""
    try:
        if (options.enable_lora or options.allow_lora_updates) and engine.adapters.pools is None:
            raise AdapterError(
                "the engine does not accept adapters",
                at=options.engine,
                fix="build it with --enable-lora, or serve the model",
            )
        for name, directory in options.adapters:
            engine.adapters.load(name, directory, taken=names)
    except AdapterError:
        engine.close()
        raise


def _load(options: ServeOptions) -> Engine:
    engine = load(
        options.engine,
        threads=options.threads,
        kv_cache_bytes=options.kv_cache_memory_bytes,
        kv_memory=options.gpu_memory_utilization,
        max_sequences=options.max_num_seqs,
        max_step_tokens=options.max_num_batched_tokens,
        prefix_cache=options.enable_prefix_caching,
        kv_compression=options.kv_compression,
        state_cache_bytes=options.state_cache_bytes,
        kv_offloading_size=options.kv_offloading_size,
        kv_offloading_dir=options.kv_offloading_dir,
        speculation=options.speculative_config,
        output_cache_bytes=options.output_cache_bytes,
    )
    if options.max_model_len is not None and options.max_model_len > engine.limits.max_model_len:
        engine.close()
        raise OptionError(
            f"--max-model-len {options.max_model_len} is more than the engine's {engine.limits.max_model_len}",
            at=options.engine,
            fix="rebuild the engine with a larger max_model_len, or serve the model directory",
        )
    return engine


def close_model(model: ServedModel) -> None:
    """Stop the loop and free everything; a loop that is stuck in a step ends with the process."""
    for renderer in (model.renderer, model.request_renderer):
        if renderer is not None:
            renderer.close()
    model.tokenizing.close()
    closing = threading.Thread(target=model.engine.close, daemon=True)
    closing.start()
    closing.join(_CLOSE_SECONDS)


def event_loop() -> asyncio.Runner:
    """asyncio on libuv, which takes less time for each piece of a stream."""
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def uvicorn_config(app: ASGIApp, options: ServeOptions) -> uvicorn.Config:
    """Return the configuration of uvicorn; its log of requests is at the level info."""
    return uvicorn.Config(
        app,
        http=limited_headers(_HEADER_SECONDS),
        log_level=options.uvicorn_log_level,
        access_log=options.uvicorn_log_level in ("info", "debug", "trace"),
        lifespan="off",
        log_config=_log_config(options.uvicorn_log_level),
        server_header=False,
        proxy_headers=options.proxy_headers,
        forwarded_allow_ips=options.forwarded_allow_ips,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )


def _log_config(level: str) -> dict[str, Any]:
    """uvicorn's, in which llmc's own lines look like those of uvicorn."""
    ours = {"handlers": ["default"], "level": LOG_LEVELS[level], "propagate": False}
    throughput = {**ours, "level": LOG_LEVELS["info" if level == "warning" else level]}
    return {**LOGGING_CONFIG, "loggers": {**LOGGING_CONFIG["loggers"], "llmc": ours, LOGGER: throughput}}


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which on SIGTERM or SIGINT first finishes requests in flight; new requests get 503 meanwhile. A
    second signal ends it at once. drained: whether all requests were finished at the end. beside: a coroutine that runs
    while it serves.
    """

    def __init__(
        self,
        app: FastAPI,
        options: ServeOptions,
        lifecycle: Lifecycle,
        started: Callable[[], None],
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        super().__init__(uvicorn_config(app, options))
        self.drained = False
        self._lifecycle = lifecycle
        self._seconds = options.drain_seconds
        self._started = started
        self._beside = beside
        self._task: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        if self._is_ending:
            self._drain_soon()
        elif not self.should_exit:
            self._started()
            if self._beside is not None:
                self._task = asyncio.create_task(self._beside())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._task is not None:
            self._task.cancel()
        await super().shutdown(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not passed on to uvicorn, which would raise the signal again after a clean shutdown."""
        if self._lifecycle.draining or not self._drain_soon():
            self.should_exit = True
            self.force_exit = True

    def end(self) -> None:
        """Shut down once the requests in flight got their errors. May be called from any thread at any time."""
        self._is_ending = True
        self._drain_soon()

    def _drain_soon(self) -> bool:
        """False if the server has not started."""
        if self._loop is None:
            return False
        self._lifecycle.draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)
        return True

    def _begin_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        self.drained = await self._lifecycle.drain(_TOLD_SECONDS if self._is_ending else self._seconds)
        self.should_exit = True
