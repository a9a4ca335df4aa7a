"""`llmc ptx`: the opcodes of an engine's GPU kernels, and which of them the PTX machine knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.table import Column, FittingTable, numeric, standard_output

if TYPE_CHECKING:
    from llmc.ptx.survey import OpcodeUse


def ptx(
    engine: Annotated[Path, typer.Argument(help="GPU engine directory")],
    unknown: Annotated[bool, typer.Option("--unknown", help="list only unknown opcodes")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """List the PTX opcodes of an engine's kernels, and which of them `--executor ptx` can execute.

    The exit code is 1 if any opcode is unknown.
    """
    from llmc.engine_format import read_engine
    from llmc.engine_format.kept_ptx import kept_binaries, read_ptx
    from llmc.ptx.survey import survey

    directory = read_engine(engine, check_weights=False, check_machine=False)
    binaries = kept_binaries(directory.whole_program, directory.path)
    texts = {name: read_ptx(directory.files, str(binary.assembly)) for name, binary in binaries.items()}
    uses = survey(texts)
    refused = [use for use in uses if use.refused is not None]
    shown = refused if unknown else list(uses)
    if as_json:
        print(json.dumps([_record(use) for use in shown], indent=1))
    else:
        archs = ", ".join(sorted({binary.file.rsplit(".", 2)[1] for binary in binaries.values()}))
        title = f"{len(uses)} opcodes of {len(texts)} kernels for {archs}; {len(refused)} are unknown"
        standard_output().print(_table(title, shown) if shown else title)
    if refused:
        raise typer.Exit(1)


def _table(title: str, uses: list[OpcodeUse]) -> FittingTable:
    columns = (
        Column("opcode"),
        *numeric("uses", ("kernels", 2)),
        Column("first", rank=3),
        Column("refused", rank=1, wraps=True),
    )
    table = FittingTable(title, columns)
    for use in uses:
        kernel, instruction = use.first
        place = f"{kernel}:{instruction.line}"
        table.add_row(use.opcode, str(use.count), str(len(use.kernels)), place, use.refused or "")
    return table


def _record(use: OpcodeUse) -> dict[str, object]:
    kernel, instruction = use.first
    first = {"kernel": kernel, "line": instruction.line, "source": instruction.source and str(instruction.source)}
    return {"opcode": use.opcode, "uses": use.count, "kernels": use.kernels, "first": first, "refused": use.refused}
