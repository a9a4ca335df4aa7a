"""lm_head with argmax is one product in an engine; test_compile_targets.py compiles it."""

from __future__ import annotations

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.options import BuildOptions
from llmc.program import StepOutput
from tests.codegen.tiny_models import GraphBuilder, ops
from tests.gpu_target import each_kind_of_gpu, gpu_target


@pytest.mark.parametrize("name", each_kind_of_gpu("h100"))
def test_the_best_token_is_one_product(name: str) -> None:
    b = GraphBuilder(torch.bfloat16)
    table = b.weight("embed", 32000, 256)
    x = b.call(ops.embedding.default, b.inputs["input_ids"], table)
    rows = b.call(ops.select_rows.default, x, b.inputs["logit_rows"])
    graph, _ = b.finish(b.call(ops.lm_head.default, rows, table))
    lowered = lower_device(graph, gpu_target(name), BuildOptions())
    for count in (1, 4, 5, 64):
        names = [
            launch.kernel.split(".")[0]
            for launch in lowered.program.launches
            if launch.runs(tokens=count, logit_rows=count, wanted=StepOutput.BEST)
        ]
        product = "best_gemv_kernel" if count <= 4 else "best_narrow_kernel"
        assert names[-2:] == [product, "join_chunks_kernel"], names
        assert not {"gemv_kernel", "narrow_kernel"} & set(names)
