"""The kernels whose machine code is held to budgets, at Llama 3.1 8B's sizes; those of experts at Mixtral 8x7B's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import DeviceLaunch, KernelTemplate
from llmc.codegen.triton.kernels.attention.paged_attention import paged_attention
from llmc.codegen.triton.kernels.attention.rope_kv_write import rope_kv_write
from llmc.codegen.triton.kernels.experts.expert_linear import expert_linear
from llmc.codegen.triton.kernels.products.linear import fused_linear, lm_head
from llmc.codegen.triton.kernels.rows.rms_norm import rms_norm
from llmc.formats.code_format import TOKEN_GROUP
from llmc.program import DeviceKernel
from llmc.targets import GpuTarget
from tests.codegen.triton.claimed import Claimed, rounded
from tests.codegen.triton.offline_compile import largest, meta, node_kernels
from tests.codegen.triton.quantized_weight import meta_blocked
from tests.codegen.triton.tensor_call import TensorCall
from tests.codegen.triton.turning_launch import turning_launch

Case = tuple[KernelTemplate, tuple[Any, ...]]
_OPS = torch.ops.llmc
_EXPERTS = 8
_FEW_TOKENS = 8


def _down_projection(weight: Any, x_format: str = "none") -> Case:
    x = rounded(meta(2, 14336), x_format, group=TOKEN_GROUP)
    return fused_linear, (x, weight, None, meta(2, 4096), "identity", 1.0, torch.bfloat16)


def _codes(format: str, rows: int = 4096) -> Claimed:
    scales = meta(rows, 112) if format == "int4" else meta(rows, 1, dtype=torch.float32)
    return Claimed(_OPS.dequantize.default, (meta(rows, 14336, dtype=torch.int8), scales, None, format, torch.float32))


def _experts_down_projection(weight: Any, x_format: str = "none") -> Case:
    """x: [tokens, slots, channels]."""
    x, index = rounded(meta(2, 2, 14336), x_format, group=TOKEN_GROUP), meta(2, 2, dtype=torch.int32)
    return expert_linear, (x, weight, None, index, _EXPERTS, torch.bfloat16)


def _attention() -> Case:
    cache, integers = meta(64, 8, 16, 128), torch.int32
    indices = meta(3, dtype=integers), meta(2, dtype=integers), meta(2, 8192, dtype=integers)
    trees = meta(8, dtype=torch.int64)
    return paged_attention, (meta(8, 32, 128), cache, cache, *indices, 128**-0.5, *[None] * 5, trees)


def _turning_decode() -> Case:
    """The decode of `_attention` that rotates and writes its own rows."""

    def candidates(call: Call, target: GpuTarget) -> tuple[DeviceLaunch, ...]:
        assert isinstance(call, TensorCall)
        rows, angles = meta(8, 8 * 128), meta(8, 64, dtype=torch.float32)
        given = {"k": rows, "v": rows, "cos": angles, "sin": angles, "slot_mapping": meta(8, dtype=torch.int32)}
        decode = paged_attention.candidates(call, target)[0].then[-1]
        return (turning_launch(call, decode, given, 64, False),)

    return replace(paged_attention, candidates=candidates), _attention()[1]


def _rope_kv_write() -> Case:
    q, k, angles = meta(2, 32, 128), meta(2, 8, 128), meta(2, 64, dtype=torch.float32)
    cache = meta(4, 8, 16, 128)
    return rope_kv_write, (q, k, k, angles, angles, cache, cache, meta(2, dtype=torch.int32), False)


CASES: Mapping[str, Callable[[], Case]] = {
    "product": lambda: _down_projection(meta(4096, 14336)),
    "product of int4": lambda: _down_projection(_codes("int4")),
    "product of fp8": lambda: _down_projection(_codes("fp8")),
    "product of q4_k": lambda: _down_projection(meta_blocked("q4_k", 4096, 14336).claimed()),
    "product of q6_k": lambda: _down_projection(meta_blocked("q6_k", 4096, 14336).claimed()),
    "product of w4a8:x32": lambda: _down_projection(_codes("int4"), "int8"),
    "product of w8a8:x32": lambda: _down_projection(_codes("int8"), "int8"),
    "experts": lambda: _experts_down_projection(meta(_EXPERTS * 4096, 14336)),
    "experts of int4": lambda: _experts_down_projection(_codes("int4", _EXPERTS * 4096)),
    "experts of w4a8:x32": lambda: _experts_down_projection(_codes("int4", _EXPERTS * 4096), "int8"),
    "experts of w8a8:x32": lambda: _experts_down_projection(_codes("int8", _EXPERTS * 4096), "int8"),
    "lm_head": lambda: (lm_head, (meta(2, 4096), meta(128256, 4096), None)),
    "attention": _attention,
    "turning decode": _turning_decode,
    "rope_kv_write": _rope_kv_write,
    "rms_norm": lambda: (rms_norm, (meta(2, 4096), meta(4096), 1e-5)),
}


def case_kernels(name: str, target: GpuTarget) -> list[DeviceKernel]:
    """Of the case's candidates those for one token, and for eight if weights are codes; of each function the one with
    the largest tile."""
    template, arguments = CASES[name]()
    kernels = node_kernels(template, arguments, target)
    of_few_tokens = [k for k in kernels if 1 in (k.constants.get("TOKENS"), k.constants.get("TOKEN_BLOCK"))]
    of_few_tokens += [
        k for k in kernels if k.function == "code_narrow_kernel" and k.constants["TOKEN_BLOCK"] == _FEW_TOKENS
    ]
    others = [kernel for kernel in largest(kernels) if kernel not in of_few_tokens]
    return of_few_tokens + others
