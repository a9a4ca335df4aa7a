"""Which product kernel serves which row counts, and what each kernel refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from llmc.codegen.triton.backend import alternatives, python_function
from llmc.codegen.triton.kernel import KernelTemplate
from llmc.codegen.triton.kernels.attention.kv_write import kv_write
from llmc.codegen.triton.kernels.attention.rope_kv_write import rope_kv_write
from llmc.codegen.triton.kernels.products.dense_ways import predicted_seconds, tilings
from llmc.codegen.triton.kernels.products.linear import fused_linear, linear, lm_head
from llmc.codegen.triton.kernels.products.product import Epilogue, dense_product
from llmc.codegen.triton.kernels.products.product_choice import product_launches
from llmc.codegen.triton.kernels.products.product_way import Way
from llmc.codegen.triton.kernels.rows.embedding import embedding
from llmc.codegen.triton.kernels.rows.gated_activation import gated_activation
from llmc.codegen.triton.kernels.rows.rms_norm import add_rms_norm, rms_norm
from llmc.codegen.triton.kernels.rows.rope import rope
from llmc.codegen.triton.kernels.rows.rope_angles import rope_angles
from llmc.codegen.triton.kernels.rows.select_rows import select_rows
from llmc.program.arrival_counters import ARRIVALS
from llmc.program.launch_arguments import Operand
from llmc.targets import GPU_TARGETS, GpuTarget
from tests.codegen.triton.offline_compile import meta
from tests.codegen.triton.tensor_call import TensorCall
from tests.gpu_target import gpu_target

H100 = gpu_target("h100")


def _linear_call(outputs: int, channels: int, template: KernelTemplate = linear) -> TensorCall:
    arguments = (meta(2, channels), meta(outputs, channels), None)
    return TensorCall(template, arguments, (template.op(*arguments),), "meta", in_place=False)


def _chosen(call: TensorCall, target: GpuTarget = H100, template: KernelTemplate = linear) -> list[tuple[int, str]]:
    """(first row count, kernel) of each range."""
    ranges = alternatives(template.candidates(call, target))
    return [(only.first if only else 1, python_function(launch.function).__name__) for launch, only, _ in ranges]


def _ours(call: TensorCall, rows: int, target: GpuTarget = H100) -> Way:
    """The way that is predicted the fastest for that many rows, the library aside."""
    product = dense_product(call, Epilogue())
    tiling = min(
        (t for t in tilings(product, target, rows) if t.way is not Way.LIBRARY),
        key=lambda t: predicted_seconds(product, target, t, rows),
    )
    return tiling.way


def _kernel_for(chosen: list[tuple[int, str]], rows: int) -> str:
    return [name for first, name in chosen if first <= rows][-1]


def test_only_stored_weights_are_loaded_before_the_launch_ahead_has_ended() -> None:
    """Another launch may still write a weight that lies in a buffer."""
    product = dense_product(_linear_call(256, 4096), Epilogue())
    in_buffer = replace(product, arguments={**product.arguments, "weight_ptr": Operand("buffer", "expanded")})
    ahead = [product_launches(operand, H100)[0].constants["AHEAD"] for operand in (product, in_buffer)]
    assert ahead == [True, False]


def test_decode_reads_the_weight_once_and_prefill_runs_on_tensor_descriptors() -> None:
    chosen = _chosen(_linear_call(4096, 4096))
    assert [_kernel_for(chosen, rows) for rows in (1, 4, 16)] == ["gemv_kernel"] + ["narrow_kernel"] * 2
    call = _linear_call(4096, 4096)
    assert [_ours(call, rows) for rows in (64, 8000)] == [Way.DENSE_NARROW, Way.DENSE_PERSISTENT]


def test_every_range_of_rows_has_the_library_among_its_candidates() -> None:
    for launch, only, others in alternatives(linear.candidates(_linear_call(4096, 4096), H100)):
        names = [python_function(way.function).__name__ for way in (launch, *others)]
        assert "matmul" in names, only
        assert launch.seconds == min(way.seconds or 0.0 for way in (launch, *others))


@pytest.mark.parametrize("target", GPU_TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 33, 200, 300, 8000])
def test_every_way_to_compute_so_many_rows_can_be_measured_for_them(rows: int, target: GpuTarget) -> None:
    """Also where one way is predicted the fastest for every count, as the library often is."""
    call = _linear_call(6144, 4096)
    product = dense_product(call, Epilogue())
    carried = next(
        {(python_function(c.function).__name__, str(c.constants)) for c in (launch, *others)}
        for launch, only, others in alternatives(linear.candidates(call, target))
        if only is None or only.holds(tokens=rows, logit_rows=0)
    )
    at_most = next(count for count in (1, 2, 4, 16, 64, 256, 8192) if rows <= count)
    assert len(carried) == len(tilings(product, target, at_most))
    names = {name for name, _ in carried}
    most = 4 if target.backend == "hip" else 1 if int(target.arch) >= 90 else 2
    assert {"matmul", "gemv_kernel" if rows <= most else "narrow_kernel" if rows <= 256 else "tile_kernel"} <= names


def test_a_gate_after_the_library_costs_a_launch_and_its_bytes() -> None:
    call = _linear_call(28672, 4096)
    plain, gated = (dense_product(call, epilogue) for epilogue in (Epilogue(), Epilogue("silu", gated=True)))
    library = next(t for t in tilings(gated, H100, 64) if t.way is Way.LIBRARY)
    assert predicted_seconds(gated, H100, library, 64) > predicted_seconds(plain, H100, library, 64)
    launch = next(x for x in product_launches(gated, H100) if python_function(x.function).__name__ == "matmul")
    (finish,) = launch.then
    assert finish.arguments["product_ptr"] == launch.arguments["y_ptr"] != gated.arguments["y_ptr"]
    assert launch.arguments["OUT"] == 28672 and finish.constants["OUT"] == 14336


def test_rows_that_descriptors_cannot_read_are_loaded_through_pointers() -> None:
    assert _ours(_linear_call(4096, 4100), 8000) == Way.DENSE_TILE


def test_targets_without_descriptors_load_through_pointers() -> None:
    for target in GPU_TARGETS:
        expected = Way.DENSE_PERSISTENT if target.has_tma else Way.DENSE_TILE
        assert _ours(_linear_call(4096, 4096), 8000, target) == expected, target.name


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64, 256, 8192])
def test_prediction_is_never_below_the_roofline(rows: int) -> None:
    product = dense_product(_linear_call(6144, 4096), Epilogue())
    floor = max(product.bytes_moved(rows) / H100.bandwidth, product.operations(rows) / H100.bf16_rate)
    for tiling in tilings(product, H100, rows):
        assert floor <= predicted_seconds(product, H100, tiling, rows) < 40 * floor, tiling


def test_few_outputs_are_split_over_channels() -> None:
    launch = next(c for c in linear.candidates(_linear_call(1024, 8192), H100) if c.max_tokens == 16)
    assert launch.constants["SPLITS"] == 8 and launch.then == ()
    assert launch.arguments["arrivals_ptr"] == ARRIVALS


HALF, INT = torch.float16, torch.int32


@pytest.mark.parametrize(
    ("template", "arguments", "reason"),
    [
        (rms_norm, (meta(2, 8, dtype=torch.float64), None, 1e-5), "x is torch.float64"),
        (rms_norm, (meta(2, 3, 4, 8), None, 1e-5), r"x has shape \[2, 3, 4, 8\]"),
        (add_rms_norm, (meta(2, 8), meta(2, 8, dtype=HALF), None, 1e-5), "residual is torch.float16"),
        (gated_activation, (meta(2, 8), meta(2, 8, dtype=HALF), "silu"), "up is torch.float16"),
        (select_rows, (meta(2, 8, dtype=INT), meta(2, dtype=INT)), "x is torch.int32"),
        (embedding, (meta(2, 2, dtype=INT), meta(8, 8)), r"ids has shape \[2, 2\]"),
        (rope_angles, (meta(2, 2, dtype=INT), meta(4)), r"positions has shape \[2, 2\]"),
        (rope, (meta(2, 16), meta(2, 4), meta(2, 4), False), r"x has shape \[2, 16\]"),
        (
            kv_write,
            (meta(2, 1, 8), meta(2, 1, 8), *[meta(2, 1, 4, 8, dtype=torch.int8)] * 2, meta(2, dtype=INT)),
            "k_cache is torch.int8",
        ),
        (
            rope_kv_write,
            (
                meta(2, 1, 8, dtype=HALF),
                *[meta(2, 1, 8)] * 2,
                *[meta(2, 4)] * 2,
                *[meta(2, 1, 4, 8)] * 2,
                meta(2, dtype=INT),
                False,
            ),
            "q is torch.float16, k is torch.bfloat16",
        ),
        (linear, (meta(2, 8), meta(4, 8, dtype=torch.float32), None), "storing it as that would lose digits"),
        (lm_head, (meta(2, 2, 2, 8), meta(4, 8), None), r"x has shape \[2, 2, 2, 8\]"),
        (
            fused_linear,
            (meta(2, 8), meta(4, 8), None, meta(2, 4, dtype=HALF), "silu", 1.0),
            "residual is torch.float16",
        ),
    ],
)
def test_refusals(template: KernelTemplate, arguments: tuple[Any, ...], reason: str) -> None:
    refusal = template.supports(_node(template, arguments), H100)
    assert refusal is not None
    assert re.search(reason, refusal.reason), refusal.reason


def _node(template: KernelTemplate, arguments: tuple[Any, ...]) -> fx.Node:
    """A call of the op in a graph of its own."""
    graph = fx.Graph()
    operands: list[Any] = []
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            placeholder = graph.placeholder(f"a{i}")
            placeholder.meta["val"] = argument
            operands.append(placeholder)
        else:
            operands.append(argument)
    node = graph.call_function(template.op, tuple(operands))
    node.meta["val"] = next(a for a in reversed(arguments) if isinstance(a, Tensor))
    return node
