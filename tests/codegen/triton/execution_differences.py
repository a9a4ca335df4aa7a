"""How far the results of a kernel's PTX, executed on the CPU, are from those of its Python in Triton's interpreter.

Both get the same memory. A kernel without an explanation here stores the same bits in both; the results of one that has
an explanation are no farther apart than that says. Whole numbers and codes are always the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

# Results of 16 bits may be rounded to the number before or after, and the interpreter cuts bf16 off.
_MOST_OF_16_BITS = 2.0


@dataclass(frozen=True)
class Explanation:
    """why results differ. most: ‖compiled - interpreted‖ / ‖interpreted‖ of fp32 tensors, in epsilons."""

    why: str
    most: float


CUT = Explanation("bf16: the interpreter cuts off, PTX rounds", 0)
FUSED = Explanation("products fused into sums; approximations of exp, sin and quotients", 2)
SUMS = Explanation("order of sums; products fused into them", 8)
SHIFTED = Explanation("as sums; of values far from 0 the digits that count cancel", 2.0**10)
ROUNDED = Explanation("as sums; factors rounded to 16 bits on the way, bf16 cut off by the interpreter", 2.0**16)

EXPLANATIONS: Mapping[str, Explanation] = MappingProxyType(
    {
        **dict.fromkeys(("code_embedding_kernel", "kv_write_kernel", "rotate_heads_kernel"), CUT),
        **dict.fromkeys(("draw_chunks_kernel", "gated_activation_kernel", "mass_chunks_kernel"), FUSED),
        "finish_product_kernel": FUSED,
        **dict.fromkeys(("rope_angles_kernel", "rope_kernel", "rope_kv_write_kernel", "top_k_chunks_kernel"), FUSED),
        "turn_rows_kernel": FUSED,
        **dict.fromkeys(("sum_experts_kernel",), SUMS),
        **dict.fromkeys(("gemv_kernel", "narrow_kernel", "tile_kernel", "persistent_kernel", "code_gemv_kernel"), SUMS),
        **dict.fromkeys(("expert_tile_kernel", "expert_code_tile_kernel", "head_linear_kernel"), SUMS),
        **dict.fromkeys(("lora_expand_kernel", "lora_shrink_kernel", "quantize_tokens_kernel"), SUMS),
        **dict.fromkeys(("linear_attention_kernel", "selective_scan_kernel"), SUMS),
        **dict.fromkeys(("paged_prefill_kernel", "ragged_attention_kernel", "specialized_prefill_kernel"), SUMS),
        **dict.fromkeys(("paged_decode_kernel", "code_tile_kernel"), ROUNDED),
        **dict.fromkeys(("key_bounds_kernel", "key_masses_kernel"), ROUNDED),
        **dict.fromkeys(("sketch_moments_kernel", "leverages_kernel", "weigh_attention_kernel"), SUMS),
        **dict.fromkeys(("expected_attention_kernel", "largest_expected_kernel", "turned_means_kernel"), SUMS),
        **{"turning_angles_kernel": FUSED, "blend_scores_kernel": SUMS, "whiten_sketches_kernel": SHIFTED},
        **dict.fromkeys(("norm_kernel", "code_narrow_kernel"), SHIFTED),
    }
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Difference:
    """Of one kernel. launches: that were compared. alike: those whose results have the same bits. floats: by dtype the
    largest ‖compiled - interpreted‖ / ‖interpreted‖ of a tensor, in units of its epsilon."""

    launches: int = 0
    alike: int = 0
    floats: dict[torch.dtype, float] = field(default_factory=lambda: dict.fromkeys(FLOATS, 0.0))


@dataclass
class Differences:
    """By kernel. file: where the table is written after each launch, if anywhere."""

    file: Path | None
    found: dict[str, Difference] = field(default_factory=dict)

    def add(self, kernel: str, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """What a launch has stored, each tensor as compiled and as interpreted. Fails for what is not explained."""
        found = self.found.setdefault(kernel, Difference())
        found.launches += 1
        found.alike += all(_same_bits(*pair) for pair in pairs.values())
        for name, (compiled, interpreted) in pairs.items():
            if compiled.is_floating_point():
                far, dtype = _epsilons(compiled, interpreted), compiled.dtype
                found.floats[dtype] = max(found.floats[dtype], far)
                _check(kernel, name, dtype, far)
            else:
                assert torch.equal(compiled, interpreted), f"{kernel}: {name} is not what the interpreter stores"
        if self.file is not None:
            self.file.write_text("".join(f"{row}\n" for row in self.table()), encoding="utf-8")

    def table(self) -> Iterator[str]:
        """Markdown: the kernels that are explained, then all others."""
        yield "| kernel | launches | same bits | fp32 | fp16 | bf16 | why |"
        yield "|---|--:|--:|--:|--:|--:|---|"
        for kernel, each in sorted(self.found.items()):
            if kernel in EXPLANATIONS:
                figures = " | ".join(f"{figure:.1g}" for figure in each.floats.values())
                yield f"| `{kernel}` | {each.launches} | {each.alike} | {figures} | {EXPLANATIONS[kernel].why} |"
        others = [each for kernel, each in self.found.items() if kernel not in EXPLANATIONS]
        launches, alike = sum(each.launches for each in others), sum(each.alike for each in others)
        yield f"| {len(others)} more kernels | {launches} | {alike} | 0 | 0 | 0 | |"


def _check(kernel: str, name: str, dtype: torch.dtype, far: float) -> None:
    explanation = EXPLANATIONS.get(kernel)
    most = 0.0 if explanation is None else explanation.most if dtype is torch.float32 else _MOST_OF_16_BITS
    assert far <= most, f"{kernel}: {name} is {far:.2g} epsilons of {dtype} from the interpreter's, not {most:g}"


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
