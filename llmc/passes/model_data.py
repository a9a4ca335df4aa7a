"""Data that a pass may read in addition to the graph: weights, a tokenizer for calibration text, and a progress
callback."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llmc.formats.schemes import DEFAULT_TOKENS, TokenDefault
from llmc.graph.weights import WeightSource

T = TypeVar("T")


def _unheard(description: str, done: int, total: int) -> None:
    """A progress callback that does nothing."""


def in_one_line(tell: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """A progress callback of ModelData that tells one line of text, such as `calibrate 3/32`."""
    return lambda description, done, total: tell(f"{description} {done}/{total}")


@dataclass(frozen=True)
class ModelData:
    """The data of a model that passes may use. source: where the graph's recipes read. tokenizer: the model's
    tokenizer.json. progress: told what is being done, how many of it are done, and how many there are. tokens: how the
    target rounds tokens by default."""

    source: WeightSource
    tokenizer: Path | None = None
    progress: Callable[[str, int, int], None] = _unheard
    tokens: TokenDefault = DEFAULT_TOKENS

    def told(self, description: str, items: Iterable[T], count: int) -> Iterator[T]:
        """Yield `items` in order, reporting progress before each and completion at the end."""
        for done, item in enumerate(items):
            self.progress(description, done, count)
            yield item
        self.progress(description, count, count)
