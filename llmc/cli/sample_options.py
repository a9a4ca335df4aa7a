"""Options for the tokens that a verb runs a model on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from llmc.debug.sample_tokens import DEFAULT_LENGTH, Sample


@dataclass(frozen=True)
class SampleOptions(Sample):
    """The options as given on the command line."""

    text: Annotated[Path | None, Option(help="text file to run on; default: a paragraph of prose")] = None
    tokens: Annotated[str | None, Option(help="token ids to run on: 1,2,3")] = None
    length: Annotated[int, Option(help="number of tokens", min=2)] = DEFAULT_LENGTH
    seed: Annotated[int, Option(help="seed of random ids, if there is no tokenizer")] = 0
