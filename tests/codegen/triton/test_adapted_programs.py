"""Whole steps of GPU programs with adapters, interpreted: mixed steps give each token what its merged model would, and
others what they get from a program without adapters, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmc.adapters.adapter import read_adapter
from llmc.codegen.triton.lowering import lower_device
from llmc.frontends.capture import capture
from llmc.graph.execute import Chunk
from llmc.options import parse_options
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.program import ADAPTERS
from llmc.runtime.adapters.placed_adapter import place_adapter
from tests.adapters.directories import llama_adapter
from tests.adapters.merged_logits import merged_logits
from tests.codegen.triton.device_harness import interpreter, step_arrays
from tests.gpu_target import gpu_target
from tests.quick_sample import quick_sample
from tests.tiny_models import tiny_checkpoint, tiny_tokens

LIMITS = {"max_batch_tokens": 64, "max_logit_rows": 64, "max_model_len": 64}
POOLS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 24}


@pytest.mark.parametrize("scheme", quick_sample(["", "int8"], [""]))
def test_tokens_get_what_their_adapters_say(scheme: str, tmp_path: Path) -> None:
    captured = capture(tiny_checkpoint("llama", tmp_path / "model"), parse_options({**LIMITS, **POOLS}))
    executors = []
    for name, pools in (("plain", {}), ("pools", POOLS)):
        options = parse_options({**LIMITS, **pools, "quantize": scheme, "dtype": "float32"})
        given = captured.graph.copy() if pools else replace(captured.graph.copy(), adaptable=())
        graph = run_pipeline(given, default(), options).graph
        lowered = lower_device(graph, gpu_target("h100"), options)
        executors.append(interpreter(lowered, captured.source, 16, tmp_path / name))
    plain, adapted = executors
    program = adapted.program
    assert program.adapters is not None
    assert {launch.sides for launch in program.launches} == {(), (ADAPTERS,)}
    directories = [llama_adapter(tmp_path / f"a{i}", rank=(5, 24)[i], seed=i, scale=0.05) for i in range(2)]
    for slot, directory in enumerate(directories):
        adapted.put_adapter(slot, place_adapter("a", read_adapter(directory), program.adapters))
    lengths = (3, 2, 4, 1)
    chunks = [Chunk(i, 0, tuple(tiny_tokens(n))) for i, n in enumerate(lengths)]
    step = step_arrays(chunks, program.limits.block_size, 4)
    of = np.repeat(np.array([1, 0, 2, 1], np.int32), lengths)
    base = plain.step(step).copy()
    assert np.array_equal(adapted.step(step), base)
    logits = adapted.step(replace(step, adapter_of_token=of, adapter_of_logit_row=of))
    assert np.array_equal(logits[of == 0], base[of == 0])
    for chunk, adapter in zip(chunks, (1, 0, 2, 1), strict=True):
        if adapter and not scheme:
            rows = slice(int(step.query_starts[chunk.sequence]), int(step.query_starts[chunk.sequence + 1]))
            expected = merged_logits(directories[adapter - 1], chunk.tokens)
            assert np.abs(logits[rows] - expected).max() < 1e-4 * expected.std()
