"""Run where llmc has the product `squared_linear`: with each storage that options ask for, steps compute the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from llmc.codegen.cpp.lowering import lower
from llmc.codegen.triton.lowering import lower_device
from llmc.graph.execute import Chunk, run_steps
from llmc.graph.product_parts import parts_before
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import built_in, canonical
from llmc.passes.runner import run_pipeline
from llmc.report.coverage.observer import CoverageObserver
from llmc.targets import gpu_target, host_target
from tests.codegen.engine_harness import run_engine
from tests.graph_builder import GraphBuilder

STEPS = ((Chunk(0, 0, tuple(range(16))), Chunk(1, 0, (5, 9, 0))), (Chunk(0, 16, (7,)),))
STORED = {
    "dense": ({}, None),
    "int4": ({"quantize": "int4:g32"}, "dequantize"),
    "w8a8": ({"quantize": "w8a8:xrow"}, "dequantize"),
    "sparse": ({"sparsity": "magnitude:0.7"}, "sparse_bitmask"),
}


def check(name: str, directory: Path) -> None:
    """A norm, the product, the logits."""
    given, storage = STORED[name]
    options = parse_options({**given, "max_model_len": 64})
    b = GraphBuilder(vocab_size=61)
    normed = b.rms_norm(b.embedded(64), "norm")
    graph, source = b.finish(b.call(torch.ops.llmc.squared_linear.default, normed, b.weight("square.weight", 64, 64)))
    coverage = CoverageObserver({pass_.name for pass_ in built_in()}, options)
    passes = built_in()[len(canonical()) :]
    graph = run_pipeline(graph, passes, options, coverage, ModelData(source)).graph
    (product,) = graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.squared_linear.default)
    weight = parts_before(product).get("weight")
    assert storage is None if weight is None else weight.target is getattr(torch.ops.llmc, str(storage)).default
    assert any("products quantized" in str(part) for part in coverage.coverage()) == ("quantize" in given)
    lowered = lower(graph, host_target(), options)
    got, want = run_engine(lowered, source, STEPS, host_target(), directory), run_steps(graph, source, STEPS)
    for step, expected in zip(got, want, strict=True):
        for a, e in zip(step, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    assert len(lower_device(graph, gpu_target("h100"), options).program.launches) > 2


if __name__ == "__main__":
    for each in STORED:
        with tempfile.TemporaryDirectory() as folder:
            check(each, Path(folder))
        print(each)
