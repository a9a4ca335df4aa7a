"""Compiled fp32 engines against the torch models in fp32: logits however the prompt is cut, and greedy text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import llmc
from llmc import SamplingParams
from llmc.architectures.tiny_config import tiny_architecture
from llmc.frontends.captured import Model
from tests.end_to_end.logits import GENERATED, assert_close, assert_greedy, random_tokens, torch_logits
from tests.plain_modules import eager_decoder, sdpa_decoder
from tests.quick_sample import quick_sample
from tests.tiny_models import FAMILIES, tiny_checkpoint, tiny_model

LENGTHS = (1, 7, 33, 100)
# Between them they call every kernel that the others' engines call, with windows, caps on scores, norms of queries and
# keys, biases, partial and interleaved rotations, merged weights and learned positions. The others' graphs are compared
# in tests/passes/test_optimized_families.py.
QUICK = (
    "llama",
    "gemma2",
    "gpt2",
    "gpt_oss",
    "llama4_text",
    "plain eager",
)
MIXTURES = ("gpt_oss", "mixtral")
# Models whose code bounds the tokens, masks or biases scores in its own way, or repeats tables. BLOOM and MPT have
# slopes, DeepSeek V3 and MiniCPM3 latents, Llama 4 has chunks and layers without positions, Gemma 3n streams.
OWN_CODE: dict[str, dict[str, Any]] = {
    "bloom": {},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
}
OF_MEMORY = (
    *("codegen", "gemma3n_text", "git", "gpt_neo", "gpt_neox_japanese", "mpt", "openai-gpt"),
    *("deepseek_v3", "minicpm3", "roformer", "xglm"),
)
PLAIN: dict[str, Callable[[], nn.Module]] = {"plain SDPA": sdpa_decoder, "plain eager": eager_decoder}


@dataclass(frozen=True)
class Case:
    model: nn.Module
    engine: Path


@pytest.fixture(
    scope="module",
    params=quick_sample((*FAMILIES, *MIXTURES, *OWN_CODE, *OF_MEMORY, *PLAIN), QUICK),
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A tiny random model and its fp32 engine."""
    name: str = request.param
    directory = tmp_path_factory.mktemp("case")
    engine = directory / "engine.llmc"
    of_memory = PLAIN[name]() if name in PLAIN else tiny_architecture(name) if name in OF_MEMORY else None
    settings = OWN_CODE.get(name, {})
    given: Model = of_memory or tiny_checkpoint(name, directory / "model", **settings)
    llmc.build(given, engine, target="cpu", dtype="float32", max_batch_tokens=64, max_logit_rows=32)
    yield Case(of_memory or tiny_model(name, **settings).train(False), engine)


@pytest.mark.parametrize("step", [64, 5, 1], ids=["whole", "chunks of 5", "token by token"])
def test_logits_are_the_models(case: Case, step: int) -> None:
    with llmc.load(case.engine, max_step_tokens=step) as engine:
        for length in LENGTHS:
            tokens = random_tokens(engine.info.vocab_size, length)
            assert_close(engine.logits(tokens), torch_logits(case.model, tokens))


def test_sequences_that_share_steps_have_the_models_logits(case: Case) -> None:
    with llmc.load(case.engine, max_step_tokens=16) as engine:
        prompts = [random_tokens(engine.info.vocab_size, length) for length in (3, 50, 1, 21)]
        for tokens, ours in zip(prompts, engine.logits(prompts), strict=True):
            assert_close(ours, torch_logits(case.model, tokens))


def test_greedy_text_is_the_models(case: Case) -> None:
    with llmc.load(case.engine) as engine:
        prompts = [random_tokens(engine.info.vocab_size, length) for length in (9, 2)]
        params = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
        for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
            assert_greedy(case.model, prompt, list(completion.token_ids))
