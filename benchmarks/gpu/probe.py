"""Measure this GPU's ceilings: a large device-to-device copy, counted read plus written, and a large bf16 product."""

from __future__ import annotations

import torch
from triton.testing import do_bench

from benchmarks.gpu.measurement import Measurement, report

COPY_BYTES = 4 << 30
SIDE = 8192


def main() -> None:
    report(copy_probe())
    report(product_probe())


def copy_probe() -> Measurement:
    """Bytes read and written."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = [do_bench(lambda: target.copy_(source), return_mode="median") / 1e3 for _ in range(3)]
    return Measurement("probe", "copy", "torch", tuple(seconds), bytes=2.0 * COPY_BYTES)


def product_probe() -> Measurement:
    """Random data: zeros run faster."""
    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = [do_bench(lambda: left @ right, return_mode="median") / 1e3 for _ in range(3)]
    return Measurement("probe", "bf16 product", "cuBLAS", tuple(seconds), flops=2.0 * SIDE**3)


if __name__ == "__main__":
    main()
