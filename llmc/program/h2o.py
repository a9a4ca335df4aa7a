"""KV compression by accumulated attention (docs/kv-compression.md)."""

from dataclasses import dataclass
from typing import ClassVar

from llmc.program.updated_compression import Updated


@dataclass(frozen=True)
class H2O(Updated):
    """A row's score is the sum of the attention that all queries since its own have paid to it.

    Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for efficient generative inference of large language models".
    """

    NAME: ClassVar[str] = "h2o"
