"""`llmc serve`: an engine, or a model directory that is built first, behind OpenAI's API."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from llmc.errors import OptionError
from llmc.settings import settings

if TYPE_CHECKING:
    from llmc.runtime.server.options import ServeOptions


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the flags of a YAML file as defaults; those on the command line count more."""
    if path is not None:
        known = {name.lstrip("-").replace("-", "_"): p for p in context.command.params for name in p.opts}
        values = config_values(path, known)
        context.default_map = {
            known[name].name: [value]
            if getattr(known[name], "multiple", False) and not isinstance(value, list)
            else value
            for name, value in values.items()
        }
    return path


def config_values(path: Path, known: Container[str]) -> dict[str, Any]:
    """The file's flags, spelled with underscores. Raises OptionError for a file or a flag that cannot be."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(
            f"the configuration cannot be read: {' '.join(str(error).split())}", at=path, fix="name a YAML file"
        ) from None
    if not isinstance(content, dict):
        raise OptionError("the configuration is not a mapping of flags to values", at=path, fix="write `port: 8000`")
    values = {str(name).replace("-", "_"): value for name, value in content.items()}
    for name in values:
        if name not in known or name == "config":
            raise OptionError(f"the configuration has an unknown flag {name!r}", at=path, fix="see `llmc serve --help`")
    return values


def serve(
    model: Annotated[Path, typer.Argument(help="engine directory, or a model directory that is built (once) for it")],
    config: Annotated[
        Path | None, typer.Option(callback=read_config, is_eager=True, help="a YAML file with any of these flags")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 is every one of this machine")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8000,
    uds: Annotated[Path | None, typer.Option(help="listen on a Unix socket instead")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="needed on every route but /health (repeatable); also LLMC_API_KEY")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="what requests call the model (repeatable)")
    ] = None,
    target: Annotated[str, typer.Option(help="of a model directory's engine; see `llmc targets`")] = "cpu",
    dtype: Annotated[str, typer.Option(help="of a model directory's engine")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="of a model directory's engine")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="longest prompt and output together, in tokens")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="sequences in a step")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="tokens in a step")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="the KV cache's share of the free memory, on a CPU of this machine's")
    ] = None,
    kv_cache_memory_bytes: Annotated[int | None, typer.Option(help="the KV cache's size instead")] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="reuse common beginnings")
    ] = True,
    output_cache_bytes: Annotated[int, typer.Option(help="keep finished deterministic outputs; 0 keeps none")] = 0,
    threads: Annotated[int | None, typer.Option(help="of a step; default: every core, shared by the replicas")] = None,
    seed: Annotated[int | None, typer.Option(help="draws the seeds of requests without one")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="a Jinja file, `plain` or `chatml`; default: the model's")
    ] = None,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="requests may bring a chat template")
    ] = False,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="hermes, mistral or llama3_json; default: by the template")
    ] = None,
    generation_config: Annotated[
        str, typer.Option(help="auto: the model's sampling defaults; llmc: OpenAI's")
    ] = "auto",
    allowed_origins: Annotated[
        list[str] | None, typer.Option(help="web origins that may use the API (repeatable)")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="a larger request gets 413")] = 4 << 20,
    max_waiting: Annotated[int | None, typer.Option(help="with more waiting, new requests get 429")] = None,
    stall_seconds: Annotated[float, typer.Option(help="a longer step makes /health answer 503")] = 30.0,
    drain_seconds: Annotated[float, typer.Option(help="for requests in flight after SIGTERM")] = 30.0,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="replicas of the engine behind the port")] = 1,
    routing: Annotated[str, typer.Option(help="among replicas: prefix or least-loaded")] = "prefix",
    uvicorn_log_level: Annotated[str, typer.Option(help="critical … warning, info, debug, trace")] = "warning",
) -> None:
    """Serve completions and chat over HTTP, with a live page at /. SIGTERM finishes what is in flight."""
    from llmc.runtime.server.early_end import end_on_sigterm

    end_on_sigterm()
    require_serve_extra()
    from llmc.runtime.server.options import ServeOptions

    default_key = settings().api_key
    keys = tuple(api_key or ()) or (() if default_key is None else (default_key,))
    options = ServeOptions(
        engine=model,
        host=host,
        port=port,
        uds=uds,
        api_keys=keys,
        served_model_name=tuple(served_model_name or ()),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        enable_prefix_caching=enable_prefix_caching,
        output_cache_bytes=output_cache_bytes,
        threads=threads,
        seed=seed,
        chat_template=chat_template,
        trust_request_chat_template=trust_request_chat_template,
        tool_call_parser=tool_call_parser,
        generation_config=generation_config,
        allowed_origins=tuple(allowed_origins or ()),
        max_body_bytes=max_body_bytes,
        max_waiting=max_waiting,
        stall_seconds=stall_seconds,
        drain_seconds=drain_seconds,
        uvicorn_log_level=uvicorn_log_level,
    )
    built = {"dtype": dtype, "kv_dtype": kv_cache_dtype}
    start(options_for(options, target, built), data_parallel_size, routing)


def require_serve_extra() -> None:
    """Raise OptionError if the packages of the extra are missing."""
    from importlib.util import find_spec

    needed = ("fastapi", "uvicorn", "uvloop", "httptools", "jinja2", "prometheus_client", "aiohttp")
    missing = [name for name in needed if not find_spec(name)]
    if missing:
        raise OptionError(
            f"serving needs {', '.join(missing)}, which is not installed",
            at="llmc serve",
            fix="pip install 'llmc-compiler[serve]'",
        )


def options_for(options: ServeOptions, target: str, built: dict[str, Any]) -> ServeOptions:
    """The same options with an engine: that of a model directory is found in the cache, or built."""
    from dataclasses import replace

    from llmc.engine_format.manifest import is_engine

    if is_engine(options.engine):
        return options
    from llmc.cli.build import StageBars
    from llmc.engine_cache import find_or_build_engine

    limits = {
        "max_model_len": options.max_model_len,
        "max_sequences": options.max_num_seqs,
        "max_batch_tokens": options.max_num_batched_tokens,
    }
    given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    name = options.served_model_name or (options.engine.resolve().name,)
    with StageBars() as shown:
        engine = find_or_build_engine(options.engine, target=target, progress=shown, **built, **given)
    return replace(options, engine=engine, served_model_name=name)


def start(options: ServeOptions, replicas: int, routing: str) -> None:
    """Serve from this process, or from replicas behind it."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    show = banner(console, options)
    if replicas == 1:
        from llmc.runtime.server.serve import serve as serve_engine

        drained = serve_engine(options, show)
    else:
        from llmc.runtime.server.replicas.serve_replicas import serve_replicas

        drained = serve_replicas(options, replicas, routing, show)
    if drained:
        console.print("[dim]every request was finished; bye[/]")
    else:
        console.print(f"[yellow]requests were cut off after {options.drain_seconds:g} s (--drain-seconds)[/]")


def banner(console: Console, options: ServeOptions) -> Any:
    """Prints where the server is, once it is."""

    def show(address: str) -> None:
        console.print(f"[bold]llmc[/] serves [bold]{options.engine.name}[/] at [bold]{address}[/]")
        console.print(
            f"  [dim]API[/]   {address}/v1    [dim]live page[/]  {address}/    [dim]metrics[/]  {address}/metrics"
        )
        if not options.api_keys and options.host not in ("127.0.0.1", "::1", "localhost"):
            console.print("  [yellow]no API key: everybody who reaches this address may use it[/]")

    return show
