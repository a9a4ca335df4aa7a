"""Weight panels: each element is where kernels/api.h says."""

from __future__ import annotations

import pytest
import torch

from llmc.codegen.cpp.pack import pack, packed_nbytes
from llmc.codegen.cpp.panel import PANEL
from llmc.errors import LoweringError
from llmc.program import Layout

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


@dtypes
@pytest.mark.parametrize(("out", "columns"), [(1, 1), (32, 4), (33, 5), (95, 6)])
def test_elements_of_panels(dtype: torch.dtype, out: int, columns: int) -> None:
    weight = torch.arange(1, out * columns + 1).reshape(out, columns).to(dtype)
    packed = pack(weight, Layout.PANELS, dtype)
    step = 2 if dtype == torch.bfloat16 else 1
    view = packed.view(-(-out // PANEL), -(-columns // step), PANEL, step)
    for o in range(out):
        for k in range(columns):
            assert view[o // PANEL, k // step, o % PANEL, k % step] == weight[o, k]
    assert packed.count_nonzero() == weight.count_nonzero()
    assert packed.dtype == dtype and packed.nbytes == packed_nbytes((out, columns), Layout.PANELS, dtype)


@dtypes
@pytest.mark.parametrize("out", [1, 16, 19, 40])
def test_gated_panels_interleave_sixteen_rows_of_gate_and_up(dtype: torch.dtype, out: int) -> None:
    weight = torch.arange(1, 2 * out * 3 + 1).reshape(2 * out, 3).to(dtype)
    packed = pack(weight, Layout.GATED_PANELS, dtype)
    step = 2 if dtype == torch.bfloat16 else 1
    view = packed.view(-(-out // 16), -(-3 // step), PANEL, step)
    for o in range(out):
        for k in range(3):
            assert view[o // 16, k // step, o % 16, k % step] == weight[o, k]
            assert view[o // 16, k // step, 16 + o % 16, k % step] == weight[out + o, k]
    assert packed.count_nonzero() == weight.count_nonzero()
    assert packed.nbytes == packed_nbytes((2 * out, 3), Layout.GATED_PANELS, dtype)


def test_rows_and_vectors_are_only_cast() -> None:
    weight = torch.randn(3, 5).t()
    assert torch.equal(pack(weight, Layout.ROWS, torch.bfloat16), weight.bfloat16().flatten())
    vector = torch.randn(7).bfloat16()
    assert torch.equal(pack(vector, Layout.VECTOR_F32, torch.bfloat16), vector.float())
    assert packed_nbytes((5, 3), Layout.ROWS, torch.bfloat16) == 30
    assert packed_nbytes((7,), Layout.VECTOR_F32, torch.bfloat16) == 28


def test_a_view_and_another_dtype_are_packed_like_their_copy() -> None:
    weight = torch.randn(40, 70)[3:38, 1:64:2]
    expected = pack(weight.contiguous().bfloat16(), Layout.PANELS, torch.bfloat16)
    assert torch.equal(pack(weight, Layout.PANELS, torch.bfloat16), expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LoweringError, match=r"shape \[7\] cannot be put into panels"):
        pack(torch.zeros(7), Layout.PANELS, torch.float32)
    with pytest.raises(LoweringError, match="an odd number of rows, 5"):
        packed_nbytes((5, 4), Layout.GATED_PANELS, torch.float32)
