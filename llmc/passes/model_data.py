"""What a pass may read beside the graph: weights, a tokenizer for calibration text, and someone to tell of progress."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmc.graph.weights import WeightSource


def _unheard(description: str, done: int, total: int) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class ModelData:
    """source: where the graph's recipes read. tokenizer: the model's tokenizer.json. progress: told what is being
    done, how many of it are done, and how many there are."""

    source: WeightSource
    tokenizer: Path | None = None
    progress: Callable[[str, int, int], None] = _unheard
