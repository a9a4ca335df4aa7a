"""Kernels of public origin, as compiled for an A100 and an H100, compute what their formulas say; nothing is found in
them, and faults that are planted in their PTX are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc.program import DeviceKernel, DeviceParameter
from llmc.ptx.errors import PtxError
from llmc.ptx.finding import Check
from llmc.ptx.machine import Report
from tests.codegen.triton.ptx_device import PtxDevice, buffer_of, launch_compiled
from tests.ptx import public_kernels
from tests.seeded_normal import seeded_normal

_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


Arguments = dict[str, Tensor | int | float]


def _parameter(name: str, value: Tensor | int | float) -> DeviceParameter:
    if isinstance(value, Tensor):
        return DeviceParameter(name, f"*{_TYPES[value.dtype]}", True)
    if isinstance(value, float):
        return DeviceParameter(name, "fp32", False)
    return DeviceParameter(name, "i32", value % 16 == 0)


def launch(
    gpu: PtxDevice,
    name: str,
    arguments: Arguments,
    constants: Mapping[str, int | bool],
    grid: Sequence[int],
    warps: int,
    edits: Sequence[tuple[str, str]] = (),
) -> Report:
    """Run a kernel of public_kernels.py on tensors, with edits of its PTX. The last tensor is the output."""
    parameters = tuple(_parameter(key, value) for key, value in arguments.items())
    kernel = DeviceKernel(name, str(public_kernels.__file__), name, parameters, dict(constants), warps, 3)
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    output = list(tensors)[-1]
    written = torch.zeros(tensors[output].numel() * tensors[output].itemsize, dtype=torch.uint8)
    buffers = {
        key: buffer_of(key, i, value, written if key == output else None, is_writable=key == output)
        for i, (key, value) in enumerate(tensors.items())
    }
    values: dict[str, Any] = {**arguments, **{key: buffer.address for key, buffer in buffers.items()}}
    return launch_compiled(gpu, kernel, tuple(grid), values, list(buffers.values()), [buffers[output]], edits)


def test_vectors_are_added(gpu: PtxDevice) -> None:
    x, y = seeded_normal(0, 5000), seeded_normal(1, 5000)
    z = torch.zeros_like(x)
    arguments: Arguments = {"x_ptr": x, "y_ptr": y, "z_ptr": z, "count": 5000}
    assert not launch(gpu, "add_vectors", arguments, {"BLOCK": 1024}, (5,), 4).findings
    assert torch.equal(z, x + y)


@pytest.mark.parametrize(("rows", "columns"), [(7, 781), (3, 64)])
def test_softmax(gpu: PtxDevice, rows: int, columns: int) -> None:
    x = 4 * seeded_normal(0, rows, columns)
    y = torch.zeros_like(x)
    arguments: Arguments = {"x_ptr": x, "y_ptr": y, "columns": columns}
    assert not launch(gpu, "softmax_rows", arguments, {"BLOCK": 1024}, (rows,), 4).findings
    torch.testing.assert_close(y, x.softmax(1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layer_norm(gpu: PtxDevice, dtype: torch.dtype) -> None:
    x = seeded_normal(0, 5, 1151, mean=0.5).to(dtype)
    weight, bias, y = seeded_normal(1, 1151), seeded_normal(2, 1151), torch.zeros_like(x)
    arguments: Arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "y_ptr": y,
        "columns": 1151,
        "eps": 1e-5,
    }
    assert not launch(gpu, "norm_rows", arguments, {"BLOCK": 512}, (5,), 4).findings
    wanted = torch.nn.functional.layer_norm(x.float(), (1151,), weight, bias, 1e-5)
    tolerance = 2e-3 if dtype is torch.float16 else 1e-5
    torch.testing.assert_close(y.float(), wanted.to(dtype).float(), rtol=tolerance, atol=1e-5)


PRODUCT: dict[str, Any] = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "GROUP": 8}


def product(gpu: PtxDevice, dtype: torch.dtype, edits: Sequence[tuple[str, str]] = ()) -> tuple[Report, Tensor, Tensor]:
    """Of matrices that no tile divides, but whose rows are aligned; the report, what was found and what is right."""
    a, b = seeded_normal(0, 150, 208).to(dtype), seeded_normal(1, 208, 104).to(dtype)
    c = torch.zeros(150, 104, dtype=dtype)
    arguments: Arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": 150, "N": 104, "K": 208}
    report = launch(gpu, "multiply", arguments, PRODUCT, (6,), 4, edits)
    return report, c.double(), a.double() @ b.double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrix_product(gpu: PtxDevice, dtype: torch.dtype) -> None:
    report, actual, wanted = product(gpu, dtype)
    assert not report.findings
    error = float((actual - wanted).norm() / wanted.norm())
    assert error < (5e-4 if dtype is torch.float16 else 4e-3)


def attention(
    gpu: PtxDevice, *, specialized: bool = False, edits: Sequence[tuple[str, str]] = (), queries: int = 100
) -> tuple[Report, Tensor, Tensor]:
    """Of rows that no tile divides; the report, what was found and what is right."""
    q, k, v = (seeded_normal(i, n, 64).half() for i, n in enumerate((queries, 200, 200)))
    y = torch.zeros(queries, 64, dtype=torch.float16)
    arguments: Arguments = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "y_ptr": y,
        "queries": queries,
        "keys": 200,
        "scale": 0.125,
    }
    constants = {"ROWS": 128 if specialized else 64, "KEYS": 64, "DIM": 64, "SPECIALIZED": specialized}
    report = launch(gpu, "attend", arguments, constants, (-(-queries // constants["ROWS"]),), 4, edits)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.float()[None], k.float()[None], v.float()[None])[0]
    return report, y.double(), wanted.double()


def test_flash_attention(gpu: PtxDevice) -> None:
    """Its tiles come by bulk tensor copies on an H100, and by cp.async on an A100."""
    report, actual, wanted = attention(gpu)
    assert not report.findings, report.findings
    assert float((actual - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.slow
def test_flash_attention_with_specialized_warps(gpu: PtxDevice) -> None:
    """One warpgroup copies, the others multiply: they wait for each other at mbarriers alone."""
    report, actual, wanted = attention(gpu, specialized=True)
    assert not report.findings, report.findings
    assert float((actual - wanted).norm() / wanted.norm()) < 1e-3


# ---- faults in compiled PTX ------------------------------------------------------------------------------------------


REMOVED = {
    "a100": [
        (r"cp\.async\.wait_group \t\d+;", {Check.ASYNC_COPY}),
        (r"bar\.sync \t0;(?=(?:(?!bar\.sync)[^$])*ldmatrix)", {Check.RACE, Check.ASYNC_COPY}),
    ],
    "h100": [
        (r"wgmma\.fence\.sync\.aligned;", {Check.WGMMA_FENCE}),
        (r"wgmma\.wait_group\.sync\.aligned 0;", {Check.REGISTERS}),
        (r"cp\.async\.wait_group \t\d+;", {Check.ASYNC_COPY}),
        (r"fence\.proxy\.async\.shared::cta;", {Check.PROXY}),
    ],
}


def test_waits_and_fences_taken_out_of_a_product_are_found(gpu: PtxDevice) -> None:
    for pattern, checks in REMOVED[gpu]:
        report, *_ = product(gpu, torch.float16, [(pattern, "")])
        assert {finding.check for finding in report.findings} & checks, (pattern, report.findings)


def test_an_index_moved_by_one_in_a_product_is_found(gpu: PtxDevice) -> None:
    report, *_ = product(gpu, torch.float16, [(r"(st\.global\.(?:v\d\.)?b\d+ \[ %rd\d+) \+ 0 \]", r"\1 + 208 ]")])
    checks = {finding.check for finding in report.findings}
    assert checks & {Check.BOUNDS, Check.OUTPUT}, report.findings


def test_every_finding_names_the_line_of_the_kernel(gpu: PtxDevice) -> None:
    report, *_ = product(gpu, torch.float16, [(r"cp\.async\.wait_group \t\d+;", "")])
    finding = report.findings[0]
    assert finding.instruction is not None and finding.instruction.source is not None
    assert re.fullmatch(r"public_kernels\.py:\d+", str(finding.instruction.source))
    assert finding.kernel == "multiply" and finding.block is not None


def test_waits_for_bulk_copies_taken_out_of_flash_attention(gpu: PtxDevice) -> None:
    if gpu == "a100":
        pytest.skip("an A100 has no bulk copies")
    wait = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 complete, [^;]*;\s*@!complete bra\.uni waitLoop;"
    report, *_ = attention(gpu, edits=[(wait, "")])
    assert report.findings[0].check is Check.ASYNC_COPY


def test_bytes_that_flash_attention_expects_and_nobody_copies(gpu: PtxDevice) -> None:
    if gpu == "a100":
        pytest.skip("an A100 has no bulk copies")
    expected = r"(mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\]), \d+;"
    with pytest.raises(PtxError, match=r"waits forever in block 0: threads 0 to 127 .* for phase 0 of the mbarrier"):
        attention(gpu, edits=[(expected, r"\1, 48;")])
