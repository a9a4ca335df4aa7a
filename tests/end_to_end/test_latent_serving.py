"""Latents in the cache know no difference: prefix hits, forks, preemption and verified drafts change no bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc import SamplingParams
from llmc.architectures.tiny_config import tiny_architecture
from tests.end_to_end.test_states import bits, built, tokens_of
from tests.quick_sample import quick_sample
from tests.runtime.speculation.guesses import Open

MODELS = ["axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"]
# Chains, where an n-gram is found again, and trees in every step.
DRAFTS: list[dict[str, Any]] = [{"method": "ngram", "num_speculative_tokens": 4}, {"method": "lookahead"}]


def latent_engine(model_type: str, path: Path, **options: Any) -> Path:
    """Rotary parts and latents of one head, and nothing else, are what a token takes."""
    engine_path = built(tiny_architecture(model_type), path, max_model_len=240, **options)
    with llmc.load(engine_path) as engine:
        config = tiny_architecture(model_type).config
        width = config.kv_lora_rank + config.qk_rope_head_dim
        assert "kv_cache" in options or (engine.manifest.memory["kv_per_token"] == config.num_hidden_layers * width * 4)
    return engine_path


@pytest.mark.parametrize("model_type", quick_sample(MODELS, set()))
def test_hits_forks_preemption_and_drafts_equal_a_cold_run(model_type: str, tmp_path: Path) -> None:
    path = latent_engine(model_type, tmp_path / "engine.llmc")
    # Prompts that repeat themselves, so that n-grams are found, and that begin alike.
    prompts = [[*tokens_of(40), *tokens_of(9, seed=i) * 3] for i in range(6)]
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=3, n=2, logprobs=1, ignore_eos=True)
    beams = SamplingParams(max_tokens=10, beam_width=3, ignore_eos=True)
    with llmc.load(path, prefix_cache=False) as engine:
        cold = [bits(engine, [prompt], params)[0] for prompt in prompts]
        searched = bits(engine, prompts[:1], beams)
        block_bytes = engine.manifest.memory["kv_per_token"] * engine.limits.block_size
    with llmc.load(path) as warm:
        for _ in range(2):
            assert bits(warm, prompts, params) == cold
            assert bits(warm, prompts[:1], beams) == searched
        assert all(completion.cached_tokens >= 48 for completion in warm.generate(prompts, params))
    with llmc.load(path, kv_cache_bytes=16 * block_bytes, max_step_tokens=11) as tight:
        assert bits(tight, prompts, params) == cold
        assert tight.loop.scheduler.preemptions > 0
    for given in DRAFTS:
        with llmc.load(path, speculation=given, kv_cache_bytes=24 * block_bytes) as drafting:
            speculation = drafting.loop.speculation
            assert speculation is not None
            speculation._gate = Open(speculation._gate.most)
            for _ in range(2):
                assert bits(drafting, prompts, params) == cold
            assert given["method"] == "ngram" or speculation.stats.drafts > 0


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", ["int8", "fp8", "int8:rotated:recent=20"])
def test_latents_in_codes_equal_the_reference_however_a_prompt_is_cut(kv_cache: str, tmp_path: Path) -> None:
    """A value that lies between two codes may take the other one where sums are added up in another order: MiniCPM3's
    do not here, and no router makes more of it."""
    paths = {
        target: latent_engine("minicpm3", tmp_path / f"{target}.llmc", target=target, kv_cache=kv_cache)
        for target in ("cpu", "reference")
    }
    tokens = tokens_of(150)
    with llmc.load(paths["reference"]) as oracle:
        expected = oracle.logits(tokens)
    with llmc.load(paths["cpu"]) as whole:
        actual = whole.logits(tokens)
    assert np.abs(actual - expected).max() <= 1e-4 * expected.std()
    for budget in (1, 7, 16, 33):
        for path, wanted in ((paths["cpu"], actual), (paths["reference"], expected)):
            with llmc.load(path, max_step_tokens=budget, threads=1) as cut:
                assert np.array_equal(cut.logits(tokens), wanted)
