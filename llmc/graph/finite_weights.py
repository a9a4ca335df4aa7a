"""Notice NaN and Inf among the weights while they stream through a build."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SHOWN = 4


class FiniteWeights:
    """Looks at each weight once. Whoever makes weights in several threads may share one."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int]] = {}

    def look(self, names: Sequence[str], value: Tensor) -> Tensor:
        """The value itself. names: of the checkpoint's tensors that it is made of; none for what was computed.

        A sum tells whether any number is not finite, at the speed of memory; only then are they counted.
        """
        if names and value.is_floating_point() and value.dtype.itemsize > 1 and value.numel():
            total = value.sum(dtype=torch.float32 if value.dtype.itemsize < 4 else value.dtype)
            if not bool(total.isfinite()):
                self._count(", ".join(names), value)
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

    def _count(self, name: str, value: Tensor) -> None:
        nan, inf = int(value.isnan().sum()), int(value.isinf().sum())
        if nan or inf:  # A sum of finite numbers may be too large, too.
            self._found[name] = nan, inf
