"""Notice NaN and Inf among the weights while they stream through a build."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SHOWN = 4


# The bits of infinity: those of NaNs are larger numbers, and with a sign both are the largest of all.
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000, torch.float64: 0x7FF << 52}
# Stays in a core's cache, so that looking twice reads memory once.
_CHUNK_BYTES = 1 << 18


class FiniteWeights:
    """Looks at each weight once. Whoever makes weights in several threads may share one."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int]] = {}

    def look(self, names: Sequence[str], value: Tensor) -> Tensor:
        """The value itself. names: of the checkpoint's tensors that it is made of; none for what was computed."""
        if names and value.dtype in _INFINITY and not _all_finite(value):
            self._found[", ".join(names)] = int(value.isnan().sum()), int(value.isinf().sum())
        return value

    def notes(self) -> tuple[str, ...]:
        """What a build should say: nothing, or one line that names the weights."""
        if not self._found:
            return ()
        shown = [
            f"{name} ({' and '.join(f'{n} {what}' for n, what in ((nan, 'NaN'), (inf, 'Inf')) if n)})"
            for name, (nan, inf) in sorted(self._found.items())
        ]
        more = ", …" if len(shown) > _SHOWN else ""
        are = "weight holds" if len(shown) == 1 else "weights hold"
        return (f"{len(shown)} {are} numbers that are not finite: {', '.join(shown[:_SHOWN])}{more}",)


def _all_finite(value: Tensor) -> bool:
    """By the largest bit pattern, as signed and as unsigned numbers: no copies, and as fast as memory is read."""
    size = value.dtype.itemsize
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits = value.contiguous().view(-1).view(whole).numpy()
    infinity = _INFINITY[value.dtype]
    negative = infinity | 1 << (8 * size - 1)
    step = _CHUNK_BYTES // size
    chunks = (bits[start : start + step] for start in range(0, len(bits), step))
    return all(int(chunk.max()) < infinity and int(chunk.view(f"u{size}").max()) < negative for chunk in chunks)
