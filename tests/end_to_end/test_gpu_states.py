"""Engines of recurrent models for GPUs, interpreted: transformers' numbers however a prompt is cut, and the same tokens
in company, forked and preempted.

Products of different numbers of rows round otherwise on GPUs; that states themselves keep every bit is shown for their
kernels (tests/codegen/triton/kernels/test_states.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import llmc
from llmc import SamplingParams
from llmc.architectures.tiny_config import tiny_architecture
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.runtime.engine import Engine
from tests.end_to_end.test_states import built, tokens_of

# Of each op, and of each rule and form of decay, one model alone, and a hybrid with attention.
FAMILIES = ["mamba", "mamba2", "qwen3_next", "kimi_linear", "recurrent_gemma", "rwkv", "xlstm", "minimax", "falcon_h1"]
INTERPRETED: ExecutorName = "triton_interpreter"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_says_what_transformers_says_however_a_prompt_is_cut(family: str, tmp_path: Path) -> None:
    model, tokens = tiny_architecture(family), tokens_of(17)
    path = built(model, tmp_path / "gpu.llmc", target="h100", max_batch_tokens=32)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    with (
        llmc.load(path, executor=INTERPRETED) as whole,
        llmc.load(path, executor=INTERPRETED, max_step_tokens=5) as cut,
    ):
        for actual in (whole.logits(tokens), cut.logits(tokens)):
            assert np.abs(actual - expected).max() <= 1e-4 * expected.std()


@pytest.mark.slow
def test_company_forks_and_preemption_change_no_token(tmp_path: Path) -> None:
    path = built(tiny_architecture("falcon_h1"), tmp_path / "gpu.llmc", target="h100", max_batch_tokens=32)
    prompts = [tokens_of(4 + 9 * i, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=3, n=2, ignore_eos=True)

    def answers(engine: Engine, prompts: list[list[int]]) -> list[list[tuple[int, ...]]]:
        return [[tuple(c.token_ids) for c in completion.choices] for completion in engine.generate(prompts, params)]

    with llmc.load(path, executor=INTERPRETED) as engine:
        alone = [answers(engine, [prompt])[0] for prompt in prompts]
        assert answers(engine, prompts) == alone
    with pytest.raises(llmc.LlmcError, match="one sequence of max_model_len") as caught:
        llmc.load(path, executor=INTERPRETED, kv_cache_bytes=1)
    needed = int(caught.value.problem.rsplit(" ", 1)[-1])
    with llmc.load(path, executor=INTERPRETED, kv_cache_bytes=needed, max_step_tokens=9) as tight:
        assert answers(tight, prompts) == alone
        assert tight.loop.scheduler.preemptions > 0


@pytest.mark.slow
def test_a_prefix_is_gone_on_from_its_snapshot(tmp_path: Path) -> None:
    path = built(tiny_architecture("falcon_h1"), tmp_path / "gpu.llmc", target="h100", max_batch_tokens=32)
    params = SamplingParams(max_tokens=3, temperature=0.9, seed=3, ignore_eos=True)
    talk, other = tokens_of(81), tokens_of(70, seed=5)
    with (
        llmc.load(path, executor=INTERPRETED, prefix_cache=False) as cold,
        llmc.load(path, executor=INTERPRETED) as warm,
    ):
        for prompts, hits in (([talk], [0]), ([[*talk, 7, 9], other], [80, 0]), ([other], [64])):
            completions = warm.generate(prompts, params)
            assert [completion.cached_tokens for completion in completions] == hits
            expected = cold.generate(prompts, params)
            assert [completion.choices[0].token_ids for completion in completions] == [
                completion.choices[0].token_ids for completion in expected
            ]
