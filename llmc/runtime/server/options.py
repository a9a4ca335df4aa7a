"""How to serve an engine: frozen and validated; names as vLLM has them where the meaning is the same."""

import ipaddress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llmc.errors import OptionError
from llmc.runtime.kv_tier.wish import offloading_wish
from llmc.runtime.speculation.config import parse_speculative_config

UNKNOWN_FIELDS = ("error", "warn")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a server.

    engine: an engine directory. uds: a Unix socket to listen on, instead of host and port.

    served_model_name: the model's name in requests; default the directory's name. max_model_len, max_num_seqs,
    max_num_batched_tokens: lower limits than the engine was built with. gpu_memory_utilization: the KV cache's share of
    the free memory, of the GPU or of this machine; kv_cache_memory_bytes: its size instead. enable_prefix_caching:
    reuse the keys and values of prompts with a common prefix. kv_compression: the policy for the KV cache of requests
    that name none; default that of the build. state_cache_bytes: size of the cache of a recurrent
    model's states at the ends of prefixes; 0 disables it. kv_offloading_size: size of the second tier, such as `20GB`;
    kv_offloading_dir: a directory that keeps its blocks for the next process. speculative_config: the drafter, as JSON.
    warm_up: capture graphs of a GPU before the first request. output_cache_bytes: size of the cache of deterministic
    outputs; 0 disables it. response_store_bytes: size of the
    store of /v1/responses; 0 disables it; response_store_seconds: how long responses are kept.
    chat_template: a file, or a name of BUILT_IN; default the model's.
    tool_call_parser: the form of the model's tool calls; default that of its template. reasoning_parser: the tags of
    its thoughts: `auto` by its template, `none`, a name or both tags. generation_config: `auto` takes the model's
    sampling defaults, `llmc` OpenAI's. unknown_fields: treatment of unknown request fields: `error`, or `warn`, which
    ignores them with a warning. max_waiting: maximum number of waiting requests before others get 429. stall_seconds: a
    step that takes longer makes /health answer 503. drain_seconds: time for requests in flight after SIGTERM.
    engine_restarts: how often the engine is reopened after a failed step before the process ends. allowed_hosts:
    accepted host names in addition to the server's own. proxy_headers: take the client address from a proxy's
    X-Forwarded-For; forwarded_allow_ips: trusted proxies, as addresses and networks separated by commas, or `*`.
    metrics_without_key: /metrics needs no key.
    behind_router: only llmc's own router reaches this server, and its header names the tenants; replica_index: the
    index of this replica. enable_lora: require an engine that accepts adapters; lora_modules: adapters that are loaded
    at the start, each NAME=DIRECTORY; allow_lora_updates: clients may also load and unload adapters by paths on this
    machine.
    """

    engine: Path
    enable_lora: bool = False
    lora_modules: tuple[str, ...] = ()
    allow_lora_updates: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    api_keys: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    kv_compression: str | None = None
    state_cache_bytes: int | None = None
    kv_offloading_size: str | None = None
    kv_offloading_dir: Path | None = None
    speculative_config: str | None = None
    warm_up: bool = True
    output_cache_bytes: int = 0
    response_store_bytes: int = 64 << 20
    response_store_seconds: float = 86_400.0
    threads: int | None = None
    seed: int | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str = "auto"
    generation_config: str = "auto"
    unknown_fields: str = "error"
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    proxy_headers: bool = False
    forwarded_allow_ips: str = "127.0.0.1"
    metrics_without_key: bool = False
    max_body_bytes: int = 4 << 20
    max_waiting: int | None = None
    stall_seconds: float = 30.0
    drain_seconds: float = 30.0
    engine_restarts: int = 0
    uvicorn_log_level: str = "warning"
    behind_router: bool = False
    replica_index: int = 0

    def __post_init__(self) -> None:
        self._check("port", 0 <= self.port <= 65535, "0 to 65535; 0 takes a free one")
        self._check("max_body_bytes", self.max_body_bytes >= 1024, "at least 1024")
        self._check("stall_seconds", self.stall_seconds > 0, "more than 0")
        self._check("response_store_seconds", self.response_store_seconds > 0, "more than 0")
        offloading_wish(self.kv_offloading_size, self.kv_offloading_dir, prefix_cache=self.enable_prefix_caching)
        if self.speculative_config is not None:
            parse_speculative_config(self.speculative_config)
        share = self.gpu_memory_utilization
        self._check("gpu_memory_utilization", share is None or 0 < share <= 1, "a share from above 0 to 1")
        for name in (
            "drain_seconds",
            "engine_restarts",
            "state_cache_bytes",
            "output_cache_bytes",
            "response_store_bytes",
        ):
            self._check(name, (getattr(self, name) or 0) >= 0, "0 or more")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "max_waiting"):
            value = getattr(self, name)
            self._check(name, value is None or value >= 1, "1 or more")
        named = all(all(part.strip() for part in module.partition("=")) for module in self.lora_modules)
        self._check("lora_modules", named, "NAME=DIRECTORY")
        self._check("api_keys", all(self.api_keys), "keys that are not empty")
        self._check("served_model_name", all(self.served_model_name), "names that are not empty")
        self._check("forwarded_allow_ips", are_networks(self.forwarded_allow_ips), "addresses or networks, or *")
        self._check("generation_config", self.generation_config in ("auto", "llmc"), "auto or llmc")
        self._check("unknown_fields", self.unknown_fields in UNKNOWN_FIELDS, " or ".join(UNKNOWN_FIELDS))
        self._check("uvicorn_log_level", self.uvicorn_log_level in LOG_LEVELS, f"one of {', '.join(LOG_LEVELS)}")

    @property
    def adapters(self) -> tuple[tuple[str, Path], ...]:
        """The names and directories in lora_modules."""
        return tuple((name, Path(path)) for name, _, path in (module.partition("=") for module in self.lora_modules))

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            flag = f"--{name.replace('_', '-')}"
            value = "…" if name == "api_keys" else repr(getattr(self, name))
            raise OptionError(f"{flag} cannot be {value}", at=f"{flag} {value}", fix=f"give {allowed}")


def parsed(kind: type[Any], name: str, value: Any) -> Any:
    """The value of a field as a command line or JSON has it: lists become tuples, and texts numbers or paths where the
    field is one. Raises OptionError for an unknown field."""
    known = {field.name: field for field in fields(kind)}
    if name not in known:
        raise OptionError(f"unknown option {name!r}", at=name, fix="see ServeOptions and RayOptions")
    if name in ("engine", "uds", "kv_offloading_dir"):
        return Path(value)
    kind_name = str(known[name].type)
    if kind_name.startswith("tuple"):
        return (value,) if isinstance(value, str) else tuple(value)
    if not isinstance(value, str) or "str" in kind_name:
        return value
    try:
        if "bool" in kind_name:
            return {"true": True, "false": False}[value.lower()]
        return int(value) if "int" in kind_name else float(value)
    except (KeyError, ValueError):
        raise OptionError(f"{name} cannot be {value!r}", at=name, fix=f"give a {kind_name}") from None


def are_networks(text: str) -> bool:
    """Whether a text is addresses and networks with commas between them, or a star for all."""
    try:
        return text == "*" or bool([ipaddress.ip_network(part.strip()) for part in text.split(",")])
    except ValueError:
        return False
