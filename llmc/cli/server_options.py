"""The flags of `llmc serve`, with vLLM's names where the meaning is the same."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from llmc.cli.opening_options import KvOffloadingDir, KvOffloadingSize, SpeculativeConfig
from llmc.settings import settings

if TYPE_CHECKING:
    from llmc.runtime.server.options import ServeOptions


@dataclass(frozen=True, kw_only=True)
class ListeningOptions:
    """The server's addresses and access control."""

    panel: ClassVar[str] = "Listening"

    host: Annotated[str, Option(help="address to listen on; 0.0.0.0 is every address of this machine")] = "127.0.0.1"
    port: Annotated[int, Option(help="port to listen on; 0 chooses a free one")] = 8000
    uds: Annotated[Path | None, Option(help="listen on a Unix socket instead")] = None
    api_key: Annotated[
        list[str] | None,
        Option(help="API key, needed on every route except /health (repeatable); default: LLMC_API_KEY"),
    ] = None
    allowed_origins: Annotated[list[str] | None, Option(help="web origins that may use the API (repeatable)")] = None
    allowed_hosts: Annotated[
        list[str] | None,
        Option("--allowed-host", help="further host name of this server (repeatable)"),
    ] = None
    proxy_headers: Annotated[
        bool, Option("--proxy-headers", help="trust a proxy's X-Forwarded-For and X-Forwarded-Proto")
    ] = False
    forwarded_allow_ips: Annotated[
        str, Option(help="trusted proxies: comma-separated addresses and networks, or *")
    ] = "127.0.0.1"
    metrics_without_key: Annotated[
        bool, Option("--metrics-without-key", help="leave /metrics open without an API key, for scrapers")
    ] = False
    max_body_bytes: Annotated[int, Option(help="maximum size of a request body in bytes; larger ones get 413")] = (
        4 << 20
    )
    uvicorn_log_level: Annotated[str, Option(help="log level: critical … warning, info, debug, trace")] = "warning"


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Options that affect answers."""

    panel: ClassVar[str] = "Answers"

    served_model_name: Annotated[list[str] | None, Option(help="name of the model in requests (repeatable)")] = None
    seed: Annotated[int | None, Option(help="base seed for requests that do not set their own")] = None
    chat_template: Annotated[
        str | None, Option(help="chat template: a Jinja file, `plain` or `chatml`; default: the model's")
    ] = None
    trust_request_chat_template: Annotated[
        bool, Option("--trust-request-chat-template", help="allow requests to bring a chat template")
    ] = False
    tool_call_parser: Annotated[
        str | None, Option(help="form of the model's tool calls: hermes, …; default: the template's")
    ] = None
    reasoning_parser: Annotated[
        str, Option(help="tags of the model's reasoning: auto (the template's), none, think, …, or two tags")
    ] = "auto"
    generation_config: Annotated[str, Option(help="sampling defaults: auto is the model's, llmc is OpenAI's")] = "auto"
    unknown_fields: Annotated[str, Option(help="unknown fields of requests: error, or warn in the answer")] = "error"


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """Capacity, memory and shutdown of the server."""

    panel: ClassVar[str] = "Capacity"

    max_model_len: Annotated[int | None, Option(help="maximum tokens of prompt and output together")] = None
    max_num_seqs: Annotated[
        int | None, Option("--max-sequences", "--max-num-seqs", help="maximum requests per step")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, Option("--max-batch-tokens", "--max-num-batched-tokens", help="maximum tokens per step")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None, Option(help="the KV cache's share of the free memory, of the GPU or this machine")
    ] = None
    kv_cache_memory_bytes: Annotated[int | None, Option(help="size of the KV cache in bytes, instead of a share")] = (
        None
    )
    enable_prefix_caching: Annotated[
        bool,
        Option("--enable-prefix-caching/--no-enable-prefix-caching", help="reuse keys and values of common prefixes"),
    ] = True
    state_cache_bytes: Annotated[
        int | None,
        Option(help="memory for snapshots of a recurrent model's states, for common prefixes; 0 disables them"),
    ] = None
    kv_offloading_size: KvOffloadingSize = None
    kv_offloading_dir: KvOffloadingDir = None
    speculative_config: SpeculativeConfig = None
    warm_up: Annotated[
        bool, Option("--warm-up/--no-warm-up", help="capture the graphs of a GPU before the first request")
    ] = True
    output_cache_bytes: Annotated[
        int, Option(help="memory for outputs of deterministic requests; 0 disables the cache")
    ] = 0
    response_store_bytes: Annotated[
        int, Option(help="memory for responses that /v1/responses keeps for previous_response_id; 0 disables it")
    ] = 64 << 20
    response_store_seconds: Annotated[float, Option(help="time in seconds that responses are kept")] = 86_400.0
    threads: Annotated[int | None, Option(help="threads per step; default: all cores, shared by the replicas")] = None
    max_waiting: Annotated[int | None, Option(help="maximum number of waiting requests; further ones get 429")] = None
    stall_seconds: Annotated[float, Option(help="time in seconds after which a step makes /health answer 503")] = 30.0
    drain_seconds: Annotated[float, Option(help="time in seconds for requests in flight after SIGTERM")] = 30.0
    engine_restarts: Annotated[
        int, Option(help="number of times that a failed engine is reopened before the server ends")
    ] = 0


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """LoRA adapters to serve with the model."""

    panel: ClassVar[str] = "Adapters"

    enable_lora: Annotated[
        bool, Option("--enable-lora", help="accept LoRA adapters; for a model directory, build the engine for them")
    ] = False
    lora_modules: Annotated[
        list[str] | None,
        Option(help="adapter that requests can name as their model (repeatable)", metavar="NAME=DIR"),
    ] = None
    max_loras: Annotated[int | None, Option(help="for a model directory: maximum adapters in use at once")] = None
    max_lora_rank: Annotated[int | None, Option(help="for a model directory: maximum rank of an adapter")] = None
    allow_lora_updates: Annotated[
        bool, Option("--allow-lora-updates", help="allow requests to load and unload adapters by paths on this machine")
    ] = False

    def built_with(self) -> dict[str, Any]:
        """The build options for these adapters, by the names of BuildOptions."""
        if not (self.enable_lora or self.lora_modules or self.allow_lora_updates):
            return {}
        return {"enable_lora": True, "max_loras": self.max_loras, "max_lora_rank": self.max_lora_rank}


def serve_options(
    engine: Path, adapters: AdapterOptions, *groups: ListeningOptions | AnswerOptions | CapacityOptions
) -> ServeOptions:
    """The server's options: each flag under its own name, repeated ones as tuples. Raises OptionError."""
    from llmc.runtime.server.options import ServeOptions

    values: dict[str, Any] = {field.name: getattr(group, field.name) for group in groups for field in fields(group)}
    default_key = settings().api_key
    values["api_keys"] = values.pop("api_key") or ([] if default_key is None else [default_key])
    for name in ("api_keys", "served_model_name", "allowed_origins", "allowed_hosts"):
        values[name] = tuple(values[name] or ())
    for name in ("enable_lora", "allow_lora_updates"):
        values[name] = getattr(adapters, name)
    return ServeOptions(engine=engine, lora_modules=tuple(adapters.lora_modules or ()), **values)
