"""Quantized weights that a launch expands for the library: when that is chosen, and what it needs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.tools.disasm import get_sass

from llmc.codegen.triton.backend import alternatives, python_function
from llmc.codegen.triton.compile import Workers
from llmc.codegen.triton.kernel import DeviceLaunch
from llmc.codegen.triton.kernels.products.coded_ways import decoding_instructions
from llmc.codegen.triton.kernels.products.expand_codes import expand_codes_kernel
from llmc.codegen.triton.kernels.products.linear import linear, lm_head
from llmc.codegen.triton.launch_alternatives import launch_alternatives
from llmc.codegen.triton.lowering import lower_device
from llmc.formats.code_format import CODE_FORMATS, TOKEN_GROUP
from llmc.graph.code_numbers import code_dtype
from llmc.graph.execute import Chunk, run_steps
from llmc.options import BuildOptions
from llmc.program import RowCount
from llmc.targets import GpuTarget
from tests.blocked_parts import BLOCKED
from tests.codegen.triton.claimed import rounded
from tests.codegen.triton.device_harness import interpret_steps
from tests.codegen.triton.offline_compile import compile_checked, meta, node_kernels
from tests.codegen.triton.quantized_weight import QuantizedWeight, meta_blocked
from tests.codegen.triton.tensor_call import TensorCall
from tests.gpu_target import EACH_KIND_OF_GPU, gpu_target
from tests.passes.quantization.quantizing import captured_llama, optimized
from tests.quick_sample import quick_sample

H100, H200 = gpu_target("h100"), gpu_target("h200")


def _weight(out: int, columns: int, format: str = "int4") -> QuantizedWeight:
    if CODE_FORMATS[format].is_blocked:
        return meta_blocked(format, out, columns)
    return QuantizedWeight(meta(out, columns, dtype=code_dtype(format)), meta(out, columns // 128), None, format)


def _chosen(
    weight: QuantizedWeight, rows: int, target: GpuTarget, x_format: str = "none", x_group: int | None = None
) -> DeviceLaunch:
    """What is launched first for this number of rows."""
    columns = weight.codes.shape[1]
    arguments = (rounded(meta(2, columns), x_format, group=x_group), weight.claimed(), None, torch.bfloat16)
    call = TensorCall(linear, arguments, (meta(2, len(weight.codes)),), "meta", in_place=False)
    ranges = alternatives(linear.candidates(call, target))
    return next(x for x, only, _ in ranges if only is None or only.holds(tokens=rows, logit_rows=0))


@pytest.mark.parametrize(
    ("name", "format"),
    quick_sample(
        [(name, format) for name in EACH_KIND_OF_GPU for format in ("int4", "fp8", "q4_k", "q6_k", "nf4")],
        [("h100", "int4"), ("mi300x", "q6_k")],
    ),
)
def test_hundreds_of_tokens_are_multiplied_by_the_library(name: str, format: str) -> None:
    weight, target = _weight(6144, 4096, format), gpu_target(name)
    names = {
        rows: [python_function(x.function).__name__ for x in (launch, *launch.then)]
        for rows in (1, 16, 512, 8192)
        for launch in [_chosen(weight, rows, target)]
    }
    assert names[512] == names[8192] == ["expand_codes_kernel", "matmul"]
    assert all(functions[0].startswith("code_") for rows, functions in names.items() if rows <= 16)


def test_rounded_tokens_and_large_heads_are_multiplied_as_codes() -> None:
    """Of a head's logits few rows are wanted, and they are fp32."""
    assert python_function(_chosen(_weight(6144, 4096), 8192, H200, "int8").function) is not _expand()
    head = _weight(128256, 4096)
    arguments = (meta(2, 4096), head.claimed())
    call = TensorCall(lm_head, arguments, (meta(2, 128256, dtype=torch.float32),), "meta", in_place=False)
    assert _expand() not in {python_function(launch.function) for launch in lm_head.candidates(call, H200)}


@pytest.mark.parametrize("format", ["int4", "q4_k"])
def test_few_rounded_tokens_are_multiplied_as_numbers(format: str) -> None:
    """Others as codes, as all are on an H200 if both have 8 bits: matrix units take those as they are."""
    for stored, rows, as_numbers in ((format, 1, True), (format, 8, True), (format, 64, False), ("int8", 1, False)):
        rounding = _chosen(_weight(6144, 4096, stored), rows, H200, "int8", TOKEN_GROUP)
        (product,) = rounding.then
        function = "code_narrow_kernel" if as_numbers else "code_tile_kernel"
        assert python_function(product.function).__name__ == function
        assert rounding.constants["AS_NUMBERS"] == as_numbers
        assert product.constants["X_FORMAT"] == ("none" if as_numbers else "int8")


def test_a_workspace_takes_a_small_part_of_the_memory() -> None:
    weight, nbytes = _weight(6144, 4096), 2 * 6144 * 4096
    for memory, is_used in ((64 * nbytes, True), (64 * nbytes - 1, False)):
        launch = _chosen(weight, 8192, replace(H200, memory_bytes=memory))
        assert (python_function(launch.function) is _expand()) == is_used


def _expand() -> Any:
    return python_function(expand_codes_kernel)


OPTIONS = BuildOptions(max_batch_tokens=64, max_sequences=4, max_logit_rows=64, max_model_len=64)


def test_layers_share_a_workspace_and_give_the_graphs_logits(tmp_path: Path) -> None:
    graph = optimized("int4:g32").graph
    lowered = lower_device(graph, H100, OPTIONS)
    sites = {a.first: a for a in lowered.program.alternatives if a.launches[0].family == "expand_codes_kernel"}
    changed = launch_alternatives(lowered.program, tuple(sites.values()))
    expanding = [launch for launch in changed.launches if launch.family == "expand_codes_kernel"]
    # Two layers of four products, and the logits, which are of x's dtype here.
    assert len(expanding) == 9
    spaces = [b for b in changed.buffers if "_expanded" in b.name]
    assert len(spaces) == 9 > len({b.offset for b in spaces})
    # What does not depend on the step's rows, all of it fp32: weights, and partial results of other sites' splits.
    assert changed.arena.constant == max(4 * b.columns for b in changed.buffers if b.rows is RowCount.ONE)
    # A prompt in chunks: some of many tokens, and some that tiles of codes serve.
    tokens = tuple((7 * i + 3) % 96 for i in range(60))
    steps = ((Chunk(0, 0, tokens[:40]),), (Chunk(0, 40, tokens[40:50]), Chunk(1, 0, tokens[:36])))
    got = interpret_steps(replace(lowered, programs={"h100": changed}), captured_llama().source, steps, tmp_path)
    for ours, theirs in zip(got, run_steps(graph, captured_llama().source, steps), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() <= 1e-4 * b.std()


FORMATS = ("int4", "fp8", "nf4", *BLOCKED)


@pytest.mark.parametrize(
    ("name", "formats"),
    quick_sample(
        [("h100", FORMATS[:1]), ("mi300x", FORMATS[:1]), *((name, FORMATS) for name in EACH_KIND_OF_GPU)],
        [("h100", FORMATS[:1]), ("mi300x", FORMATS[:1])],
    ),
)
def test_a_value_takes_the_instructions_that_are_predicted(
    name: str, formats: tuple[str, ...], workers: Workers, tmp_path: Path
) -> None:
    """At most, and without spills; a program has no loop."""
    target = gpu_target(name)
    kernels = []
    for format in formats:
        arguments = (meta(2, 14336), _weight(4096, 14336, format).claimed(), None, torch.bfloat16)
        kernels += [k for k in node_kernels(linear, arguments, target) if k.function == "expand_codes_kernel"]
    compile_checked(kernels, target, workers, tmp_path)
    if target.backend != "cuda":
        return
    for index, (kernel, format) in enumerate(zip(kernels, formats, strict=True)):
        [binary] = tmp_path.glob(f"kernels/{kernel.name}.{index}.*cubin")
        count = sum(";" in line for line in get_sass(binary.read_bytes()).splitlines())
        sizes = [int(kernel.constants[size] or 1) for size in ("ROWS", "CHUNKS", "CHUNK_BYTES")]
        values = math.prod(sizes) * (1 if CODE_FORMATS[format].bits == 8 else 2)
        instructions = count * 32 * kernel.num_warps / values
        assert decoding_instructions(format) / 1.5 <= instructions <= decoding_instructions(format), format
