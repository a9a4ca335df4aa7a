"""Recurrent models and hybrids: engines equal transformers, and answers are the same bits in any company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc import SamplingParams
from llmc.architectures.tiny_config import tiny_architecture
from llmc.errors import OptionError
from llmc.runtime.engine import Engine
from tests.quick_sample import quick_sample
from tests.tiny_models import saved

LENGTHS = (1, 7, 33, 70)
# Of each op one model alone, and hybrids with attention. kimi_linear has heads as wide as real ones: loops over those
# were once compiled to different orders of sums for one thread and for many.
MODELS = [
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2"),
    *("kimi_linear", "olmo_hybrid", "qwen3_5_text", "qwen3_next"),
    *("minimax", "recurrent_gemma", "rwkv", "xlstm"),
]
HYBRID = "falcon_h1"


def tokens_of(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 150) for _ in range(count)]


def built(model: Any, path: Path, **options: Any) -> Path:
    given = {"dtype": "float32", "max_model_len": 160, "max_sequences": 8, "max_batch_tokens": 80, **options}
    llmc.build(model, path, **given)
    return path


def bits(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[object]:
    """Everything that was computed, to the last bit."""
    return [
        [(c.token_ids, [(p.logprob.hex(), p.top) for p in c.logprobs or ()]) for c in completion.choices]
        for completion in engine.generate(prompts, params)
    ]


@pytest.mark.parametrize("model_type", quick_sample(MODELS, {HYBRID}))
def test_equals_transformers_however_a_prompt_is_cut(model_type: str, tmp_path: Path) -> None:
    """fla#285: a prompt in chunks had other states than the whole."""
    model = tiny_architecture(model_type)
    path = built(saved(model, tmp_path / "model"), tmp_path / "engine.llmc")
    with llmc.load(path) as whole, llmc.load(path, max_step_tokens=5, threads=1) as cut:
        assert whole.manifest.memory["states_per_sequence"] > 0
        for length in LENGTHS:
            tokens = tokens_of(length)
            with torch.inference_mode():
                expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
            actual = whole.logits(tokens)
            assert np.abs(actual - expected).max() <= 1e-4 * expected.std()
            assert np.array_equal(cut.logits(tokens), actual)
        greedy = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        prompt = tokens_of(9)
        answer = whole.generate([prompt], greedy)[0].choices[0].token_ids
        with torch.inference_mode():
            again = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
        assert again[len(prompt) - 1 : -1].argmax(-1).tolist() == list(answer)


def test_company_forks_and_preemption_change_no_bit(hybrid: Path) -> None:
    company_forks_and_preemption(hybrid)


@pytest.mark.slow
def test_company_forks_and_preemption_change_no_bit_of_the_reference(tmp_path: Path) -> None:
    company_forks_and_preemption(
        built(saved(tiny_architecture(HYBRID), tmp_path / "model"), tmp_path / "engine.llmc", target="reference")
    )


def company_forks_and_preemption(path: Path) -> None:
    prompts = [tokens_of(5 + 11 * i, seed=i) for i in range(7)]
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=3, n=2, logprobs=1, ignore_eos=True)
    with llmc.load(path) as engine:
        alone = [bits(engine, [prompt], params)[0] for prompt in prompts]
        assert bits(engine, prompts, params) == alone
        assert engine.generate(prompts, params)[-1].cached_tokens >= 64
        beams = SamplingParams(max_tokens=12, beam_width=3, ignore_eos=True)
        wanted = bits(engine, prompts[:1], beams)
    with pytest.raises(llmc.LlmcError, match="one sequence of max_model_len") as caught:
        llmc.load(path, kv_cache_bytes=1)
    needed = int(caught.value.problem.rsplit(" ", 1)[-1])
    with llmc.load(path, kv_cache_bytes=needed, max_step_tokens=9) as tight:
        assert bits(tight, prompts, params) == alone
        assert tight.loop.scheduler.preemptions > 0
        assert bits(tight, prompts[:1], beams) == wanted


def test_what_a_step_that_failed_had_begun_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All give way at once, which a model without attention, whose blocks weigh nothing, never asks for by itself."""
    path = built(saved(tiny_architecture("mamba"), tmp_path / "model"), tmp_path / "engine.llmc", target="reference")
    prompt, params = tokens_of(12), SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    with llmc.load(path) as engine:
        wanted = engine.generate([prompt], params)[0].choices[0].token_ids
        loop = engine.loop
        before = loop.step
        counted = 0

        def step() -> Any:
            nonlocal counted
            counted += 1
            if counted % 3 == 0:
                loop.scheduler.preempt_all()
            return before()

        monkeypatch.setattr(loop, "step", step)
        assert engine.generate([prompt], params)[0].choices[0].token_ids == wanted
        assert loop.scheduler.preemptions > 0


@pytest.mark.slow
def test_rwkv_that_has_not_run_yet_is_captured_without_its_halving(tmp_path: Path) -> None:
    model, tokens = tiny_architecture("rwkv"), tokens_of(9)
    model.config.rescale_every = 1
    with llmc.load(built(model, tmp_path / "engine.llmc", target="reference")) as engine:
        actual = engine.logits(tokens)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    assert model.rwkv.layers_are_rescaled
    assert np.abs(actual - expected).max() <= 1e-3 * expected.std()


def test_drafts_are_refused(tmp_path: Path) -> None:
    path = built(saved(tiny_architecture("mamba"), tmp_path / "model"), tmp_path / "engine.llmc", target="reference")
    with pytest.raises(OptionError, match="keeps 4 states of a sequence"):
        llmc.load(path, speculation={"method": "ngram", "num_speculative_tokens": 3})


def test_ranks_are_refused(tmp_path: Path) -> None:
    model = saved(tiny_architecture("mamba"), tmp_path / "model")
    with pytest.raises(llmc.LlmcError, match="states are not divided among ranks"):
        built(model, tmp_path / "ranks.llmc", tensor_parallel_size=2)
    assert list(tmp_path.iterdir()) == [model]
