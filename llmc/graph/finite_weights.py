"""Notice NaN and Inf among the weights, and matrices of zeros, while they stream through a build."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.graph.weights import WeightSource

_SHOWN = 4


# The bits of infinity: those of NaNs are larger numbers, and with a sign both are the largest of all.
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000, torch.float64: 0x7FF << 52}
# Stays in a core's cache, so that looking twice reads memory once.
_CHUNK_BYTES = 1 << 18


class FiniteWeights:
    """Finds weights that are not finite, or all zeros, while they are read. Threads may share an instance."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int]] = {}
        self._zero: set[str] = set()

    def reading(self, source: WeightSource) -> WeightSource:
        """The source, with a check of each stored matrix before it is merged with others."""
        return _ZeroFinder(source, self._zero)

    def look(self, names: Sequence[str], value: Tensor) -> Tensor:
        """Check a value and return it. names: the checkpoint tensors it is made of; empty for computed values."""
        if names and value.dtype in _INFINITY and not _all_finite(value):
            self._found[", ".join(names)] = int(value.isnan().sum()), int(value.isinf().sum())
        return value

    def notes(self) -> tuple[str, ...]:
        """Notes for the build: one line for weights that are not finite, one for weights of zeros."""
        not_finite = [
            f"{name} ({' and '.join(f'{n} {kind}' for n, kind in ((nan, 'NaN'), (inf, 'Inf')) if n)})"
            for name, (nan, inf) in sorted(self._found.items())
        ]
        held = {"numbers that are not finite": not_finite, "nothing but zeros": sorted(self._zero)}
        return tuple(_note(names, kind) for kind, names in held.items() if names)


def _note(names: Sequence[str], what: str) -> str:
    are = "weight holds" if len(names) == 1 else "weights hold"
    more = ", …" if len(names) > _SHOWN else ""
    return f"{len(names)} {are} {what}: {', '.join(names[:_SHOWN])}{more}"


@dataclass(frozen=True)
class _ZeroFinder:
    """A WeightSource. zero: where the names of matrices of zeros go."""

    source: WeightSource
    zero: set[str]

    def names(self) -> tuple[str, ...]:
        return self.source.names()

    def load(self, name: str) -> Tensor:
        value = self.source.load(name)
        is_matrix = value.dtype in _INFINITY and value.dim() > 1 and value.numel() > 0
        # For nearly every weight the first row decides, without reading the others.
        if is_matrix and not bool(value[0].any()) and not bool(value.any()):
            self.zero.add(name)
        return value


def _all_finite(value: Tensor) -> bool:
    """Return whether all values are finite, by the largest bit pattern of signed and of unsigned numbers. This copies
    nothing."""
    size = value.dtype.itemsize
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits = value.contiguous().view(-1).view(whole).numpy()
    infinity = _INFINITY[value.dtype]
    negative = infinity | 1 << (8 * size - 1)
    step = _CHUNK_BYTES // size
    chunks = (bits[start : start + step] for start in range(0, len(bits), step))
    return all(int(chunk.max()) < infinity and int(chunk.view(f"u{size}").max()) < negative for chunk in chunks)
