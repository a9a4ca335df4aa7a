"""Sparse engines on CPUs give the bits of dense engines with the same zeros, whatever is merged, fused and rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.codegen.cpp.cpp_kind import CppKind
from llmc.codegen.cpp.lowering import Lowered, lower
from llmc.codegen.cpp.products import NO_SPARSE_EXPERTS
from llmc.codegen.expand_sparse import SPARSE, expand_sparse
from llmc.codegen.sketch import sketch
from llmc.compiler import build
from llmc.graph.execute import Chunk, run_steps
from llmc.options import parse_options
from llmc.targets import CPU_TARGETS, CpuTarget, gpu_target, host_target, resolve_target
from tests.codegen.engine_harness import run_engine
from tests.passes.quantization.quantizing import TOKENS, captured_llama
from tests.passes.sparsity.sparse_graphs import sparse
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint

STEPS = (
    (Chunk(0, 0, TOKENS[:20]), Chunk(1, 0, TOKENS[5:8])),
    (Chunk(1, 3, TOKENS[8:20]), Chunk(0, 20, TOKENS[20:21])),
    (Chunk(0, 21, TOKENS[21:22]), Chunk(1, 15, TOKENS[20:21])),
)
OPTIONS = parse_options({})
has_kernels = pytest.mark.skipif(
    not host_target().has("avx512_vbmi2"), reason="this machine reads dense weights faster"
)


ENGINES = [
    (zeros, quantize)
    for zeros in ("magnitude:0.5,lm_head=magnitude:0.4", "magnitude:2:4")
    for quantize in ("", "int8", "w8a8", "int8:g32")
]


# Each way to store values once, and each pattern twice.
@has_kernels
@pytest.mark.parametrize(("zeros", "quantize"), quick_sample(ENGINES, [*ENGINES[:4:2], *ENGINES[5::2]]))
def test_a_sparse_engine_has_the_bits_of_the_dense_one(zeros: str, quantize: str, tmp_path: Path) -> None:
    graph = sparse(zeros, quantize).graph
    source = captured_llama().source
    lowered = lower(graph, host_target(), OPTIONS)
    dense = lower(expand_sparse(graph, lambda storage: "as a test"), host_target(), OPTIONS)
    families = [launch.family for launch in lowered.program.launches]
    assert [x.removeprefix("sparse_") for x in families] == [x.removeprefix("sparse_") for x in _families(dense)]
    assert _bytes(lowered) < 0.9 * _bytes(dense)
    got = run_engine(lowered, source, STEPS, host_target(), tmp_path / "sparse")
    want = run_engine(dense, source, STEPS, host_target(), tmp_path / "dense")
    for step, expected in zip(got, want, strict=True):
        for a, b in zip(step, expected, strict=True):
            assert torch.equal(a, b)
    reference = run_steps(graph, source, STEPS)
    pairs = [(a, b) for step in zip(got, reference, strict=True) for a, b in zip(*step, strict=True)]
    assert max(float((a - b).abs().max() / b.std()) for a, b in pairs) < 0.05


def test_a_target_without_vbmi2_says_why_it_is_dense() -> None:
    graph = sparse("magnitude:0.5").graph
    for target in CPU_TARGETS:
        reason = CppKind(target).dense_reason(graph.graph.output_node())
        assert (reason is None) is target.has("avx512_vbmi2")
        assert reason is None or f"{target.name} has no VBMI2 instructions" in reason
    plain = resolve_target("cpu-x86-64-v3")
    assert isinstance(plain, CpuTarget)
    dense = expand_sparse(graph, CppKind(plain).dense_reason)
    assert {weight.bits for weight in dense.sparse} == {None}
    assert not [x for x in _families(lower(dense, plain, OPTIONS)) if x.startswith("sparse_")]


def test_a_gpu_that_reads_dense_weights_as_fast_gets_them_and_says_why() -> None:
    triton_kind = pytest.importorskip("llmc.codegen.triton.triton_kind")
    dense = expand_sparse(
        sparse("magnitude:0.5", "int8").graph, triton_kind.TritonKind(gpu_target("h100")).dense_reason
    )
    assert all("predicted for one token on h100" in (weight.reason or "") for weight in dense.sparse)
    assert not [node for node in dense.graph.nodes if node.target in SPARSE]


@has_kernels
@pytest.mark.slow
def test_experts_keep_their_zeros_and_say_why(tmp_path: Path) -> None:
    model = tiny_checkpoint("mixtral", tmp_path / "model")
    report = build(model, tmp_path / "e.llmc", target=host_target().name, sparsity="magnitude:0.5", max_model_len=64)
    reasons = {weight.module: weight.reason for weight in report.sparse}
    assert {name for name, reason in reasons.items() if reason == NO_SPARSE_EXPERTS} == {
        name for name in reasons if "expert" in name
    }
    assert any(weight.bits is not None for weight in report.sparse)


@pytest.mark.parametrize("quantize", ["", "int8"])
def test_on_paper_a_sparse_weight_takes_its_bits(quantize: str) -> None:
    """Where there are no kernels yet: for plans and simulations."""
    graph = sparse("magnitude:0.5", quantize).graph
    stored = [slot.nbytes for slot in sketch(graph, OPTIONS).weights if slot.layout.is_sparse]
    predicted = sum((weight.bits or 0.0) * weight.rows * weight.columns / 8 for weight in graph.sparse)
    assert len(stored) == 8 and sum(stored) == pytest.approx(predicted, rel=1e-6)


def _families(lowered: Lowered) -> list[str]:
    return [launch.family for launch in lowered.program.launches]


def _bytes(lowered: Lowered) -> int:
    return sum(slot.nbytes for slot in lowered.program.weights)
