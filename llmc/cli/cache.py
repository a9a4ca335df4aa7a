"""`llmc cache`: what is kept between runs, how big it is and when it was last used; `llmc cache clear` removes it."""

import json
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from llmc.cache import CacheEntry, CacheKind, cache_entries, cache_limit, open_cache
from llmc.cli.help_text import GroupHelp, VerbHelp
from llmc.cli.table import Column, FittingTable, numeric, standard_output
from llmc.cli.units import ago, in_bytes
from llmc.settings import settings

cache = typer.Typer(name="cache", cls=GroupHelp)

_KINDS = f"{', '.join(kind.value for kind in CacheKind)}; all, if none is named"
Json = Annotated[bool, typer.Option("--json", help="print everything as JSON")]


@cache.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    entries: Annotated[bool, typer.Option("--entries", help="list each entry, the most recently used first")] = False,
    as_json: Json = False,
) -> None:
    """Show the files that are kept between runs: engines of model directories, compiled kernels, captured graphs.

    LLMC_CACHE_DIR sets the directory and LLMC_CACHE_SIZE the limit; the least recently used files are deleted first.
    """
    if context.invoked_subcommand is not None:
        return
    root = settings().cache_dir
    listed = cache_entries(root)
    total = sum(entry.nbytes for entry in listed)
    limit = cache_limit(root, total, settings().cache_bytes)
    if as_json:
        content = {"directory": str(root), "bytes": total, "limit_bytes": limit, "entries": [*map(_record, listed)]}
        print(json.dumps(content, indent=1))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{root}: {in_bytes(total)} of at most {in_bytes(limit)}", markup=False)
    if listed:
        standard_output().print(_entry_table(listed) if entries else _kind_table(listed))


@cache.command("clear", cls=VerbHelp)
def clear(
    kind: Annotated[CacheKind | None, typer.Argument(metavar="kind", help=_KINDS)] = None,
    as_json: Json = False,
) -> None:
    """Remove cached files that are not in use. They are created again when needed."""
    removed: list[CacheEntry] = []
    left: list[CacheEntry] = []
    for cache_kind in CacheKind if kind is None else (kind,):
        if (settings().cache_dir / cache_kind.value).exists():
            gone, stays = open_cache(cache_kind).clear()
            removed += gone
            left += stays
    if as_json:
        print(json.dumps({"removed": [*map(_record, removed)], "in_use": [*map(_record, left)]}, indent=1))
        return
    console = Console(soft_wrap=True, highlight=False)
    count = f"{len(removed)} {'entry' if len(removed) == 1 else 'entries'}"
    console.print(f"removed {count}, {in_bytes(sum(entry.nbytes for entry in removed))}")
    for entry in left:
        console.print(f"in use, not removed: {entry.path}", markup=False)


def _kind_table(entries: list[CacheEntry]) -> FittingTable:
    counted = numeric(("entries", 2), "size", ("last used", 1))
    table = FittingTable("", (Column("kind"), *counted, Column("what", rank=3, wraps=True)))
    for kind in CacheKind:
        of_kind = [entry for entry in entries if entry.kind is kind]
        if of_kind:
            size, used = sum(entry.nbytes for entry in of_kind), max(entry.used for entry in of_kind)
            table.add_row(kind.value, str(len(of_kind)), in_bytes(size), ago(time.time() - used), kind.holds)
    return table


def _entry_table(entries: list[CacheEntry]) -> FittingTable:
    """Return a table of entries, in which only names may be folded."""
    table = FittingTable("", (Column("kind", rank=2), Column("name"), *numeric("size", ("last used", 1))))
    for entry in sorted(entries, key=lambda entry: -entry.used):
        table.add_row(entry.kind.value, entry.path.name, in_bytes(entry.nbytes), ago(time.time() - entry.used))
    return table


def _record(entry: CacheEntry) -> dict[str, Any]:
    used = datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds")
    return {"kind": entry.kind.value, "name": entry.path.name, "bytes": entry.nbytes, "used": used}
