"""KV compression in engines with adapters, and in models with windows in some layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import llmc
from llmc import SamplingParams
from llmc.architectures.tiny_config import tiny_architecture, tiny_config
from llmc.errors import OptionError
from llmc.program import CachePolicy
from llmc.runtime.engine import Engine
from tests.adapters.directories import llama_adapter
from tests.end_to_end.calibration_queries import write_calibration
from tests.end_to_end.company import least_cache_bytes
from tests.end_to_end.logits import assert_close
from tests.end_to_end.test_cache_policies import masked_logits
from tests.end_to_end.test_kv_compression import built, model
from tests.end_to_end.test_states import bits
from tests.end_to_end.test_states import built as built_tiny
from tests.tiny_models import tiny_tokens

__all__ = ["built", "model"]

TOKENS = tiny_tokens(100)
SCORED = [
    "snapkv:budget=48,every=16,window=16",
    "h2o:budget=48,every=16,recent=16",
    "lru:budget=48,every=16,recent=16",
    "compactor:budget=48,every=16,chunk=32",
    "kvzip:budget=48,every=16,chunk=32",
    "triattention:budget=8,every=16,recent=4",
    "triattention:budget=8,every=16,recent=4,heads=all",
]


def said(engine: Engine) -> tuple[int, ...]:
    (answer,) = engine.generate([TOKENS], max_tokens=40, ignore_eos=True)
    assert engine.loop.groups[0].stats.dropped or engine.loop.groups[1].stats.dropped
    return answer.choices[0].token_ids


@pytest.mark.parametrize("text", [*SCORED, "streaming:budget=48,every=16", "stride:step=2,recent=32,rows=16"])
def test_room_for_adapters_changes_no_token(text: str, built: Callable[..., Path]) -> None:
    found = []
    for options in ({}, {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}):
        with llmc.load(built(kv_compression=text, target="cpu", **options), threads=1) as engine:
            found.append(said(engine))
    assert found[0] == found[1]


@pytest.mark.parametrize("text", [SCORED[0], SCORED[4], "streaming:budget=48,every=16"])
def test_requests_with_an_adapter_are_compressed(text: str, built: Callable[..., Path], tmp_path: Path) -> None:
    """Bits are the same in chunks, beside requests without one, and with rows of their own in the prefix cache."""
    path = built(kv_compression=text, target="cpu", enable_lora=True, max_loras=2, max_lora_rank=8)
    adapter, found = llama_adapter(tmp_path / "adapter"), dict[str | None, set[str]]()
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)
    for chunk in (None, 5):
        with llmc.load(path, threads=1, max_step_tokens=chunk) as engine, ThreadPoolExecutor(2) as pool:
            engine.load_adapter("a", adapter)
            names = ["a", None] * 3
            for name, answers in zip(names, pool.map(partial(answered, engine, params), names), strict=True):
                found.setdefault(name, set()).add(repr(answers))
            assert engine.loop.groups[0].stats.dropped and engine.loop.scheduler.prefix_cache.hits
    assert len(found["a"]) == len(found[None]) == 1 and found["a"] != found[None]


def answered(engine: Engine, params: SamplingParams, adapter: str | None) -> object:
    (answer,) = engine.generate([TOKENS], params, adapter=adapter)
    return answer.choices[0].token_ids, answer.choices[0].logprobs


@pytest.mark.parametrize("family", ["gpt2", "llama4_text"])
def test_keys_without_a_rotation_are_scored_as_they_are(family: str, tmp_path: Path) -> None:
    """In all layers, or in those of several that keep everything."""
    options = {"block_size": 8, "max_model_len": 200, "kv_compression": "compactor:budget=48,every=16,chunk=32"}
    path, found = built_tiny(tiny_architecture(family), tmp_path / "engine.llmc", **options), []
    for chunk in (5, None):
        with llmc.load(path, threads=1, max_step_tokens=chunk) as engine:
            found.append(said(engine))
    assert found[0] == found[1]


def test_keys_that_are_normed_behind_their_rotation_are_refused(tmp_path: Path) -> None:
    options = {"block_size": 8, "kv_compression": "compactor:budget=48,every=16,chunk=32"}
    with pytest.raises(OptionError, match=r"keys that come from llmc\.rms_norm.*so they cannot be turned back"):
        built_tiny(tiny_architecture("hunyuan_v1_dense"), tmp_path / "engine.llmc", **options)


@pytest.mark.parametrize("text", SCORED)
def test_layers_with_windows_keep_them(text: str, tmp_path: Path) -> None:
    options = {"block_size": 8, "kv_compression": text, **write_calibration(tmp_path)}
    path, found = built_tiny(tiny_architecture("gemma2"), tmp_path / "engine.llmc", **options), []
    for chunk in (5, None):
        with llmc.load(path, threads=1, max_step_tokens=chunk) as engine:
            kinds = 2 + (CachePolicy.from_text(text).queries is not None)
            assert len(engine.loop.groups) == kinds, "windows, rows that are dropped, and queries"
            found.append(said(engine))
    assert found[0] == found[1]


STRIDE = "stride:step=3,recent=16,sinks=8,rows=8"
# Engines that no other policy serves, and states beside tables that are cut.
STRIDED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "latents": ("deepseek_v2", {}),
    "ranks": ("llama", {"tensor_parallel_size": 2}),
    "stages": ("llama", {"pipeline_parallel_size": 2}),
    "states": ("falcon_h1", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRIDED)
def test_stride_serves_every_kind_of_engine(kind: str, tmp_path: Path) -> None:
    """Logits are those of the mask, and bits are the same in chunks, with found prefixes and after preemption."""
    (family, options), tokens = STRIDED[kind], tiny_tokens(150)
    model, limits = tiny_architecture(family), {"block_size": 8, "max_model_len": 192, "kv_compression": STRIDE}
    path = built_tiny(model, tmp_path / "engine.llmc", **limits, **options)
    if kind == "states":  # A mask of transformers' model would reach its states.
        with llmc.load(built_tiny(model, tmp_path / "eager.llmc", target="reference", **limits)) as eager:
            masked = eager.logits(tokens)
    else:
        masked = masked_logits(CachePolicy.from_text(STRIDE), tokens, model)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, n=2, logprobs=1, ignore_eos=True)
    prompts = [tokens, tokens[:90], [*tokens[:64], *tokens[30:60]], tokens[20:120]]
    with llmc.load(path, threads=1) as engine:
        assert_close(engine.logits(tokens), masked)
        expected = bits(engine, prompts, params)
        assert bits(engine, prompts, params) == expected
        assert engine.loop.groups[0].stats.dropped and engine.loop.scheduler.prefix_cache.hits
    with llmc.load(path, threads=1, max_step_tokens=5, prefix_cache=False) as engine:
        assert bits(engine, prompts, params) == expected
    with llmc.load(path, threads=1, kv_cache_bytes=least_cache_bytes(path)) as engine:
        assert bits(engine, prompts, params) == expected
        assert engine.loop.scheduler.preemptions


@pytest.mark.parametrize("text", [SCORED[0], "stride:step=2,recent=32,rows=16"])
def test_a_plain_request_never_finds_blocks_behind_a_cut(text: str, tmp_path: Path) -> None:
    """Keys in a window depend on the rows that earlier layers attended to: here on those that a policy kept."""
    path = built_tiny(windows_behind_all(), tmp_path / "engine.llmc", block_size=8, kv_compression=text)
    with llmc.load(path, threads=1, prefix_cache=False) as engine:
        prompt = [*TOKENS, *said(engine)]
        expected = bits(engine, [prompt], llmc.SamplingParams(max_tokens=10, logprobs=0, kv_compression="none"))
    with llmc.load(path, threads=1) as engine:
        assert [*TOKENS, *said(engine)] == prompt
        for _ in range(2):
            plain = llmc.SamplingParams(max_tokens=10, logprobs=0, kv_compression="none")
            assert bits(engine, [prompt], plain) == expected
        assert [*TOKENS, *said(engine)] == prompt


def windows_behind_all() -> Any:
    """A model whose third layer has a window, behind one that keeps everything."""
    config = tiny_config("gemma2")
    config.num_hidden_layers, config.sliding_window = 4, 24
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    torch.manual_seed(7)
    model = transformers.Gemma2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model
