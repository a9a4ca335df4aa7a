"""The argument of the verbs that take a model: a path, or a name on the hub, which is fetched as the line is read."""

from functools import partial
from typing import Any

from typer import Argument, Option

from llmc.frontends.open_model import local_model


def model_argument(text: str, *, weights: bool = True) -> Any:
    """Annotates a Path. text: its help. weights: False for verbs that need only config.json."""
    return Argument(help=text, parser=partial(local_model, weights=weights), metavar="MODEL")


def model_option(text: str) -> Any:
    """The typer option that takes a model directory or a name on the hub. text: its help."""
    return Option(help=text, parser=local_model, metavar="MODEL")
