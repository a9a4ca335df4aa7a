"""Our side of the GPU suite, on the CPU with a tiny engine: prompts are read, and sequences go on from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import llmc_model
from benchmarks.gpu.workloads import Decode, Prefill
from llmc.engine_format import EngineDirectory
from llmc.runtime.executors.executor import Logits
from llmc.runtime.executors.opening_request import OpeningRequest
from llmc.runtime.executors.reference import ReferenceExecutor
from llmc.runtime.loop.step import Step
from tests.runtime.tiny_engine import write_tiny_engine


class CountingExecutor(ReferenceExecutor):
    """Remembers the shape of every step."""

    def __init__(self, engine: EngineDirectory, blocks: int) -> None:
        super().__init__(engine, blocks)
        self.steps: list[tuple[int, int]] = []

    def step(self, step: Step) -> Logits:
        self.steps.append((len(step.input_ids), int(step.context_lens.max())))
        return super().step(step)


def test_decode_and_prefill_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CountingExecutor] = []

    def opened(request: OpeningRequest) -> tuple[CountingExecutor, int]:
        made.append(CountingExecutor(request.directory, 20))
        return made[-1], 20

    monkeypatch.setattr(llmc_model, "open_engine", opened)
    monkeypatch.setattr(llmc_model, "ROUNDS", 2)
    monkeypatch.setattr(llmc_model, "DECODE_STEPS", 3)
    model = llmc_model.LlmcModel(write_tiny_engine(tmp_path / "e.llmc"))
    (executor,) = made
    assert len(model.decode(Decode(2, 12))) == 2
    # Two prompts of 12 tokens in steps of at most 16, then rounds of decodes whose contexts grow by one.
    assert executor.steps[:2] == [(16, 12), (9, 13)]
    decodes = executor.steps[2:]
    assert [tokens for tokens, _ in decodes] == [2] * 9
    assert [context for _, context in decodes] == list(range(14, 23))
    executor.steps.clear()
    assert len(model.prefill(Prefill(10))) == 2
    assert executor.steps == [(10, 10)] * 3
