"""Programs for GPUs of a GGUF file hold its codes, scales and minima as they are."""

from __future__ import annotations

from pathlib import Path

import torch

from llmc.codegen.target_kind import kind_of
from llmc.codegen.triton.lowering import lower_device
from llmc.compiler import packed
from llmc.frontends.capture import capture
from llmc.graph.code_numbers import weight_values
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.graph.finite_weights import FiniteWeights
from llmc.graph.serialize import read_weight_table
from llmc.options import BuildOptions
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.runtime.executors.stored_weights import in_graph
from tests.gguf_blocks import EVERY_BLOCK, write_every_block
from tests.gpu_target import gpu_target

OPTIONS = BuildOptions(max_batch_tokens=16, max_sequences=4, max_logit_rows=16, max_model_len=32, dtype="float32")


def test_every_value_is_the_files(tmp_path: Path) -> None:
    """What is packed for the kernels, taken apart and decoded, against what the gguf package makes of the blocks."""
    path = tmp_path / "tiny.gguf"
    meant = write_every_block(path).state_dict()
    captured = capture(path, OPTIONS)
    graph = run_pipeline(captured.graph, default(), OPTIONS, data=ModelData(captured.source)).graph
    assert {weight.scheme for weight in graph.quantized} == {*EVERY_BLOCK.values()}
    lowered, kind = lower_device(graph, gpu_target("h100"), OPTIONS), kind_of(gpu_target("h100"))
    assert lowered.graph_text is not None
    stored = {
        slot.name: (slot, packed(slot, recipe, captured.source, FiniteWeights(), kind))
        for slot, recipe in zip(lowered.program.weights, lowered.recipes, strict=True)
    }
    table = read_weight_table(lowered.graph_text, tmp_path)
    read = {name: in_graph(stored[of.slot][1], stored[of.slot][0], of) for name, of in table.items()}
    assert all(TORCH_DTYPES[table[name].dtype] is part.dtype for name, part in read.items())
    decoded = []
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.llmc.dequantize.default):
        codes, scales, zeros, format, _, *more = (*node.args, None, None, None)[:8]
        parts = [None if part is None else read[part.name] for part in (codes, scales, zeros)]
        rest = [None if part is None else read[part.name] for part in more]
        decoded.append(weight_values(parts[0], parts[1], parts[2], str(format), *rest))  # type: ignore[arg-type]
    rows = {row.numpy().tobytes() for weight in decoded for row in weight}
    wanted = [weight for name, weight in meant.items() if weight.dim() == 2]
    assert sum(map(len, wanted)) == sum(map(len, decoded))
    for weight in wanted:
        assert all(row.float().numpy().tobytes() in rows for row in weight)
