"""`llmc serve`: an engine, or a model directory that is built first, behind OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from llmc.cli.engine_options import EngineOptions
from llmc.cli.missing_package import require_extra
from llmc.cli.model_argument import model_argument
from llmc.cli.server_options import AdapterOptions, AnswerOptions, CapacityOptions, ListeningOptions, serve_options
from llmc.errors import OptionError
from llmc.files.hub_model import repository_of

if TYPE_CHECKING:
    from llmc.runtime.server.options import ServeOptions


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the flags of a YAML file as defaults; flags on the command line take precedence."""
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
    """The file's flags, spelled with underscores. Raises OptionError for an invalid file or flag."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(
            f"the configuration cannot be read: {' '.join(str(error).split())}", at=path, fix="name a YAML file"
        ) from None
    if not isinstance(content, dict):
        raise OptionError("the configuration is not a mapping of flags to values", at=path, fix="write `port: 8000`")
    # A flag with a JSON value may also be a YAML mapping.
    values = {
        str(name).replace("-", "_"): json.dumps(value) if isinstance(value, dict) else value
        for name, value in content.items()
    }
    for name in values:
        if name not in known or name == "config":
            raise OptionError(f"the configuration has an unknown flag {name!r}", at=path, fix="see `llmc serve --help`")
    return values


def serve(
    model: Annotated[Path, model_argument("engine directory, or a model, whose engine is built once and cached")],
    config: Annotated[
        Path | None, typer.Option(callback=read_config, is_eager=True, help="YAML file with any of these flags")
    ] = None,
    *,
    listening: ListeningOptions,
    answers: AnswerOptions,
    capacity: CapacityOptions,
    adapters: AdapterOptions,
    built: EngineOptions,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="number of replicas of the engine behind the port")
    ] = 1,
    routing: Annotated[str, typer.Option(help="choice of the replica: prefix or least-loaded")] = "prefix",
) -> None:
    """Serve completions and chat over HTTP, with a live page at /. SIGTERM finishes the requests in flight."""
    from llmc.runtime.server.early_end import end_on_sigterm

    end_on_sigterm()
    require_extra("serve", "llmc serve")
    options = serve_options(model, adapters, listening, answers, capacity)
    options = replace(options, kv_compression=built.kv_compression)
    start(with_engine(options, built, adapters), data_parallel_size, routing)


def with_engine(options: ServeOptions, built: EngineOptions, adapters: AdapterOptions) -> ServeOptions:
    """Return the options with an engine's path: a model directory's engine comes from the cache, or is built."""
    engine = built.engine(
        options.engine,
        max_model_len=options.max_model_len,
        max_sequences=options.max_num_seqs,
        max_batch_tokens=options.max_num_batched_tokens,
        **adapters.built_with(),
    )
    if engine == options.engine:
        return options
    # The engine is named after its cache key, but requests use the model's name.
    name = options.served_model_name or (repository_of(options.engine) or options.engine.resolve().name,)
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
    """Print the server's address once it listens."""
    from llmc.runtime.server.host_check import is_loopback
    from llmc.runtime.server.model_forms import model_forms

    def show(address: str) -> None:
        console.print(f"[bold]llmc[/] serves [bold]{options.engine.name}[/] at [bold]{address}[/]")
        console.print(
            f"  [dim]API[/]   {address}/v1    [dim]live page[/]  {address}/    [dim]metrics[/]  {address}/metrics"
        )
        forms = model_forms(options)
        if forms.template is not None:
            console.print(Text(f"  {forms.described()}", "dim"))
        if not options.api_keys and options.uds is None and not is_loopback(options.host):
            console.print("  [yellow]no API key: anyone who can reach this address may use the server[/]")

    return show
