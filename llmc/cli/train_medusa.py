"""`llmc train-medusa`: draft heads for an engine, trained on text that its own model generates."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.stage_bars import StageBars
from llmc.cli.table import Column, FittingTable, facts, numeric, standard_output
from llmc.cli.units import in_seconds

if TYPE_CHECKING:
    from llmc.training.train_medusa import TrainedHeads


def train_medusa(
    engine: Annotated[Path, typer.Argument(help="engine directory, built for this machine's CPU")],
    text: Annotated[Path, typer.Option(help="UTF-8 text from which prompts are cut")],
    output: Annotated[Path, typer.Option("--output", "-o", help=".safetensors file to write")],
    heads: Annotated[int, typer.Option(help="number of tokens to draft after the next one")] = 3,
    layers: Annotated[int, typer.Option(help="layers per head")] = 1,
    tokens: Annotated[int, typer.Option(help="number of tokens that the engine generates for training")] = 50_000,
    temperature: Annotated[float, typer.Option(help="temperature of this generation")] = 0.0,
    chat: Annotated[
        bool, typer.Option("--chat", help="use prompts as user messages, and train on the answers of a chat model")
    ] = False,
    epochs: Annotated[int, typer.Option(help="maximum number of epochs")] = 5,
    seed: Annotated[int, typer.Option(help="seed; the same one gives the same heads")] = 0,
    threads: Annotated[int | None, typer.Option(help="threads; default: physical cores")] = None,
) -> None:
    """Train Medusa draft heads for an engine. `llmc build --speculative` builds them in."""
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
    table = FittingTable("acceptance on held-out tokens", (Column("head"), *numeric("top-1", "top-5")))
    for index, head in enumerate(trained.heads):
        table.add_row(f"head {index} (token t+{index + 2})", f"{head.top_1:.3f}", f"{head.top_5:.3f}")
    return table


def _summary(trained: TrainedHeads) -> FittingTable:
    table = facts(f"{trained.path}", right=True)
    table.add_row("tokens", f"{trained.tokens:,}")
    table.add_row("epochs", str(trained.epochs))
    table.add_row("loss, initial and best", f"{trained.losses[0]:.3f}, {min(trained.losses):.3f}")
    for name, seconds in trained.seconds.items():
        table.add_row(name, in_seconds(seconds))
    return table
