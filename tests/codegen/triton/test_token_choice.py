"""lm_head with argmax is one product in an engine; test_compile_targets.py compiles it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmc.codegen.triton.lowering import lower_device
from llmc.codegen.triton.token_choice import rows_left
from llmc.options import BuildOptions
from llmc.program import Launch, RowCount, RowRange, StepOutput
from llmc.program.launch_arguments import Operand
from tests.codegen.tiny_models import GraphBuilder, ops
from tests.gpu_target import each_kind_of_gpu, gpu_target


def lowered_head(vocab_size: int, width: int, target: str) -> tuple[Launch, ...]:
    """Launches of an embedding and the output projection over its table."""
    b = GraphBuilder(torch.bfloat16)
    table = b.weight("embed", vocab_size, width)
    x = b.call(ops.embedding.default, b.inputs["input_ids"], table)
    rows = b.call(ops.select_rows.default, x, b.inputs["logit_rows"])
    graph, _ = b.finish(b.call(ops.lm_head.default, rows, table))
    return lower_device(graph, gpu_target(target), BuildOptions()).program.launches


@pytest.mark.parametrize("name", each_kind_of_gpu("h100"))
def test_the_best_token_is_one_product(name: str) -> None:
    launches = lowered_head(32000, 256, name)
    for count in (1, 4, 5, 64):
        names = [
            launch.kernel.split(".")[0]
            for launch in launches
            if launch.runs(tokens=count, logit_rows=count, wanted=StepOutput.BEST)
        ]
        most = 1 if name == "h100" else 4
        product = "best_gemv_kernel" if count <= most else "best_narrow_kernel"
        assert names[-2:] == [product, "join_chunks_kernel"], names
        assert not {"gemv_kernel", "narrow_kernel"} & set(names)


@pytest.mark.parametrize(("vocab_size", "width"), [(32000, 256), (512, 4096)])
def test_one_launch_gives_the_best_tokens_of_any_number_of_rows(vocab_size: int, width: int) -> None:
    """Of a product that is split its logits are looked through."""
    launches = lowered_head(vocab_size, width, "h100")
    ranges = [launch.only for launch in launches if launch.only is not None]
    ends = [only.last for only in ranges if only.last is not None]
    for count in {1, *(only.first for only in ranges), *ends, *(last + 1 for last in ends)}:
        writing = [
            launch.kernel.split(".")[0]
            for launch in launches
            if launch.runs(tokens=count, logit_rows=count, wanted=StepOutput.BEST)
            and Operand("output", "tokens") in launch.arguments.values()
        ]
        assert len(writing) == 1, f"{count} rows"


def test_what_lies_between_ranges_is_left() -> None:
    launch = lowered_head(512, 64, "h100")[-1]

    def rows(first: int, last: int | None) -> RowRange:
        return RowRange(RowCount.LOGIT_ROWS, first, last)

    done = [replace(launch, only=only) for only in (rows(33, 64), rows(5, 8))]
    assert rows_left(done) == [rows(1, 4), rows(9, 32), rows(65, None)]
    assert rows_left([*done, replace(launch, only=rows(65, None))]) == [rows(1, 4), rows(9, 32)]
    assert rows_left([*done, replace(launch, only=None)]) == []
    assert rows_left([]) == [None]
