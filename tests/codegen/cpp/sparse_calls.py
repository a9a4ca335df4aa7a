"""Random weights with zeros, and the kernels over sparse panels called beside those over dense ones."""

from __future__ import annotations

from ctypes import c_void_p

import torch
from torch import Tensor

from llmc.codegen.cpp.kernel import SCALES
from llmc.codegen.cpp.pack import pack
from llmc.codegen.cpp.pack_codes import pack_codes
from llmc.codegen.cpp.pack_sparse import pack_sparse, pack_sparse_codes
from llmc.codegen.cpp.panel import PANEL
from llmc.program import Layout
from llmc.targets import CpuTarget
from tests.codegen.cpp.kernel_calls import call, kernels, pointer, rows

# Of products: layouts of the weight with its zeros and without, of plain numbers and of codes.
_PLAIN = {False: (Layout.PANELS, Layout.SPARSE_PANELS), True: (Layout.GATED_PANELS, Layout.GATED_SPARSE_PANELS)}
_CODED = {
    False: (Layout.CODE_PANELS, Layout.SPARSE_CODE_PANELS),
    True: (Layout.GATED_CODE_PANELS, Layout.GATED_SPARSE_CODE_PANELS),
}


def with_zeros(out: int, channels: int, share: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A weight [out, channels] of which that share is zero, the first row and the last column wholly."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(out, channels, generator=generator) >= share
    if out > 1 and channels > 1:
        kept[0], kept[:, -1] = False, False
    if dtype is torch.int8:
        values = torch.randint(-127, 128, (out, channels), generator=generator)
    else:
        values = torch.randn(out, channels, generator=generator)
    return torch.where(kept, values, torch.zeros_like(values)).to(dtype)


def both(
    target: CpuTarget,
    kernel: str,
    x: Tensor,
    weight: Tensor,
    *,
    scales: Tensor | None = None,
    x_format: str = "none",
    pool: c_void_p | None = None,
    threads: int = 2,
) -> tuple[Tensor, Tensor]:
    """What linear, gated_linear or lm_head makes of x and a weight with its zeros, and of the same without them.

    scales: [out, groups], of a weight of codes.
    """
    tokens, channels = x.shape
    is_gated = kernel == "gated_linear"
    out = weight.shape[0] // (2 if is_gated else 1)
    values: dict[str, object] = {"tokens": tokens, "in": channels, "out": out, "x": rows(x), "scale": 1.0}
    values |= {"activation": "silu" if is_gated else "identity"}
    if scales is None:
        dense, sparse = _PLAIN[is_gated]
        names = (kernel, f"sparse_{kernel}")
        packed = pack(weight, dense, x.dtype), pack_sparse(weight, sparse, x.dtype)
    else:
        dense, sparse = _CODED[is_gated]
        names = (f"quantized_{kernel}", f"quantized_{kernel}")
        packed = (
            pack_codes({"codes": weight, "scales": scales}, "int8", dense),
            pack_sparse_codes(weight, scales, sparse),
        )
        values |= {"format": "int8", "x_format": x_format, "scale_type": SCALES[scales.dtype], "has_zeros": False}
        values |= {"group": channels // scales.shape[1]}
    results = []
    for name, data, is_sparse in zip(names, packed, (False, True), strict=True):
        y = torch.full((tokens, out), 7.0, dtype=torch.float32 if kernel == "lm_head" else x.dtype)
        given = values | {"weight": pointer(data), "y": rows(y)} | ({} if scales is None else {"is_sparse": is_sparse})
        scratch = kernels(target).llmc_linear_scratch(tokens, channels)
        call(target, name, [x.dtype], given, threads=threads, scratch=scratch, pool=pool)
        results.append(y)
    return results[0], results[1]


def call_sparse_embedding(
    target: CpuTarget, ids: Tensor, weight: Tensor, dtype: torch.dtype, scales: Tensor | None = None
) -> Tensor:
    """Rows of a weight without its zeros. ids: int32."""
    y = torch.empty(len(ids), weight.shape[1], dtype=dtype)
    values: dict[str, object] = {"tokens": len(ids), "channels": y.shape[1], "ids": pointer(ids), "y": rows(y)}
    values |= {"panels": -(-weight.shape[0] // PANEL)}
    if scales is None:
        packed = pack_sparse(weight, Layout.SPARSE_PANELS, dtype)
        call(target, "sparse_embedding", [dtype], values | {"weight": pointer(packed)})
        return y
    packed = pack_sparse_codes(weight, scales, Layout.SPARSE_CODE_PANELS)
    values |= {"format": "int8", "scale_type": SCALES[scales.dtype], "is_sparse": True, "weight": pointer(packed)}
    values |= {"group": weight.shape[1] // scales.shape[1]}
    call(target, "sparse_code_embedding", [dtype], values)
    return y
