"""How far the results of a kernel's PTX, executed on the CPU, are from those of its Python in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Difference:
    """Of one kernel on one GPU. launches: that were compared. alike: those whose results have the same bits. floats:
    by dtype the largest ‖compiled - interpreted‖ / ‖interpreted‖ of a tensor, in units of its epsilon. codes: the
    largest share of the elements of a tensor of whole numbers that are not the same."""

    launches: int = 0
    alike: int = 0
    floats: dict[torch.dtype, float] = field(default_factory=lambda: dict.fromkeys(FLOATS, 0.0))
    codes: float = 0.0


@dataclass
class Differences:
    """By kernel and GPU. file: where the table is written after each launch, if anywhere."""

    file: Path | None
    found: dict[tuple[str, str], Difference] = field(default_factory=dict)

    def add(self, kernel: str, gpu: str, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """What a launch has stored, each tensor as compiled and as interpreted."""
        found = self.found.setdefault((kernel, gpu), Difference())
        found.launches += 1
        found.alike += all(_same_bits(*pair) for pair in pairs.values())
        for compiled, interpreted in pairs.values():
            if compiled.is_floating_point():
                dtype = compiled.dtype
                found.floats[dtype] = max(found.floats[dtype], _epsilons(compiled, interpreted))
            elif compiled.numel():
                found.codes = max(found.codes, float((compiled != interpreted).float().mean()))
        if self.file is not None:
            self.file.write_text("".join(f"{row}\n" for row in self.table()), encoding="utf-8")

    def table(self) -> Iterator[str]:
        """Markdown."""
        yield "| kernel | GPU | launches | same bits | fp32 | fp16 | bf16 | whole numbers |"
        yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
        for (kernel, gpu), each in sorted(self.found.items()):
            figures = " | ".join(f"{figure:.2g}" for figure in (*each.floats.values(), each.codes))
            yield f"| {kernel} | {gpu} | {each.launches} | {each.alike} | {figures} |"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Every NaN is like every other."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)) and torch.equal(a.isnan(), b.isnan())


def _epsilons(a: Tensor, b: Tensor) -> float:
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return float("inf")
    first, second = (each.double().nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0) for each in (a, b))
    return float((first - second).norm() / second.norm().clamp_min(1e-30)) / torch.finfo(a.dtype).eps
