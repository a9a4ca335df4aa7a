"""`llmc train-medusa`: draft heads for an engine, trained on text that its own model generates."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.stage_bars import StageBars
from llmc.cli.table import Column, FittingTable, facts, numeric, standard_output
from llmc.cli.units import in_seconds
from llmc.plural import counted

if TYPE_CHECKING:
    from llmc.training.train_medusa import TrainedHeads


def train_medusa(
    engine: Annotated[Path, typer.Argument(help="engine directory, built for this machine's CPU")],
    text: Annotated[Path, typer.Option(help="UTF-8 text that prompts are cut from")],
    output: Annotated[Path, typer.Option("--output", "-o", help=".safetensors file to write")],
    heads: Annotated[int, typer.Option(help="tokens after the next one that are drafted")] = 3,
    layers: Annotated[int, typer.Option(help="of each head")] = 1,
    tokens: Annotated[int, typer.Option(help="that the engine writes to train on")] = 50_000,
    temperature: Annotated[float, typer.Option(help="at which it writes them")] = 0.0,
    chat: Annotated[
        bool, typer.Option("--chat", help="prompts are a user's messages; heads learn the answers of a chat model")
    ] = False,
    epochs: Annotated[int, typer.Option(help="at the most")] = 5,
    seed: Annotated[int, typer.Option(help="the same one gives the same heads")] = 0,
    threads: Annotated[int | None, typer.Option(help="default: physical cores")] = None,
) -> None:
    """Train draft heads (Medusa) for an engine, to be built in by `llmc build --speculative`."""
    from llmc.training.train_medusa import train_medusa as train

    with StageBars() as shown:
        trained = train(
            engine,
            text,
            output,
            heads=heads,
            layers=layers,
            tokens=tokens,
            temperature=temperature,
            chat=chat,
            epochs=epochs,
            seed=seed,
            threads=threads,
            progress=shown,
        )
    console = standard_output()
    console.print(_acceptance_table(trained))
    console.print(_summary(trained))
    path = shlex.quote(str(trained.path))
    console.print(f"build them in: llmc build MODEL --speculative {path} -o ENGINE", soft_wrap=True, markup=False)


def _acceptance_table(trained: TrainedHeads) -> FittingTable:
    table = FittingTable("accepted, of tokens that were kept apart", (Column("head"), *numeric("top-1", "top-5")))
    for index, head in enumerate(trained.heads):
        table.add_row(f"{index}, {counted(index + 2, 'token')} on", f"{head.top_1:.3f}", f"{head.top_5:.3f}")
    return table


def _summary(trained: TrainedHeads) -> FittingTable:
    table = facts(f"{trained.path}", right=True)
    table.add_row("tokens", f"{trained.tokens:,}")
    table.add_row("epochs", str(trained.epochs))
    table.add_row("loss, initial and best", f"{trained.losses[0]:.3f}, {min(trained.losses):.3f}")
    for name, seconds in trained.seconds.items():
        table.add_row(name, in_seconds(seconds))
    return table
