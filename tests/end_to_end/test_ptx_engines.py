"""Whole engines for GPUs, executed as they were compiled: the reference's logits, and its greedy tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import llmc
from llmc import SamplingParams
from llmc.architectures.tiny_config import tiny_architecture
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.runtime.engine import Engine
from llmc.runtime.speculation import opening
from tests.adapters.directories import llama_adapter
from tests.gguf_blocks import write_every_block
from tests.medusa_heads import medusa_1
from tests.runtime.speculation.guesses import Open
from tests.tiny_models import saved, tiny_checkpoint, tiny_tokens

pytestmark = pytest.mark.slow
EXECUTED: ExecutorName = "ptx"
MODELS = Path(__file__).parents[2] / "examples" / "models"
LIMITS: Mapping[str, Any] = MappingProxyType(
    {"max_model_len": 96, "max_batch_tokens": 32, "max_sequences": 4, "max_logit_rows": 32}
)
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
# Of the largest difference over the logits' spread: bf16 keeps 8 bits, and sums are rounded where kernels cut them.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06}
EXAMPLES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "bfloat16": ("bard-draft", {}),
        "int4": ("bard-draft", {"quantize": "int4"}),
        "mixture": ("bard-mixture", {}),
        "hybrid": ("bard-hybrid", {}),
    }
)
gpus = pytest.mark.parametrize("target", ["a100", "h100"])


def agree(path: Path, prompts: list[list[int]]) -> None:
    """Prompts in one step and cut into several, which decode beside those that are not done yet."""
    with llmc.load(path, executor="reference") as reference:
        expected = reference.logits(prompts[0])
        wanted = tokens_of(reference, prompts, GREEDY)
    with llmc.load(path, executor=EXECUTED) as engine, llmc.load(path, executor=EXECUTED, max_step_tokens=7) as cut:
        difference = np.abs(engine.logits(prompts[0]) - expected).max() / expected.std()
        assert difference <= TOLERANCE[engine.info.dtype]
        assert tokens_of(engine, prompts, GREEDY) == wanted
        assert tokens_of(cut, prompts, GREEDY) == wanted


def tokens_of(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    return [tuple(completion.choices[0].token_ids) for completion in engine.generate(prompts, params)]


@gpus
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, target: str, tmp_path: Path) -> None:
    model, options = EXAMPLES[name]
    path = llmc.build(MODELS / model, tmp_path / "e.llmc", target=target, **{**LIMITS, **options}).path
    with llmc.load(path, executor="reference") as engine:
        prompts = [engine.tokenize(text) for text in ("KING RICHARD III:\nNow is", "What say you", "O")]
    agree(path, prompts)


@gpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_newest_rows(dtype: str, target: str, tmp_path: Path) -> None:
    """Beside codes that are rotated. Prompts are longer than the newest rows, and answers begin before them."""
    model, options = tiny_checkpoint("llama", tmp_path / "model"), {"dtype": dtype, **LIMITS}
    path = tmp_path / "e.llmc"
    llmc.build(model, path, target=target, kv_cache="int4:head:rotated:recent=9", **options)
    agree(path, [tiny_tokens(40), tiny_tokens(6), tiny_tokens(17)])


@gpus
def test_blocks_of_a_gguf_file(target: str, tmp_path: Path) -> None:
    """Every type, as it is stored, in the graph's own numbers and in the kernels'."""
    model = write_every_block(tmp_path / "tiny.gguf")
    path = llmc.build(tmp_path / "tiny.gguf", tmp_path / "e.llmc", target=target, dtype="float32", **LIMITS).path
    tokens = tiny_tokens(19)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    with llmc.load(path, executor="reference") as reference:
        assert np.abs(reference.logits(tokens) - wanted).max() / wanted.std() <= TOLERANCE["float32"]
    agree(path, [tokens, tiny_tokens(3)])


@gpus
def test_latent_attention(target: str, tmp_path: Path) -> None:
    model = saved(tiny_architecture("deepseek_v3"), tmp_path / "model")
    path = llmc.build(model, tmp_path / "e.llmc", target=target, dtype="float32", **LIMITS).path
    agree(path, [tiny_tokens(19, 100), tiny_tokens(3, 100)])


@gpus
def test_adapters(target: str, tmp_path: Path) -> None:
    """Requests with one, and without: as a CPU's engine answers them."""
    model, adapter = tiny_checkpoint("llama", tmp_path / "model"), llama_adapter(tmp_path / "adapter", scale=0.05)
    pools: Any = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "float32"}
    answers = []
    for compiled_for, executor in (("cpu", None), (target, EXECUTED)):
        path = llmc.build(model, tmp_path / f"{compiled_for}.llmc", target=compiled_for, **LIMITS, **pools).path
        with llmc.load(path, executor=executor) as engine:
            engine.load_adapter("mine", adapter)
            plain = tokens_of(engine, [tiny_tokens(9)], GREEDY)
            adapted = engine.generate([tiny_tokens(9)], GREEDY, adapter="mine")[0].choices[0].token_ids
            answers.append((plain, tuple(adapted)))
    assert answers[0] == answers[1]


@gpus
def test_medusa_drafts_change_no_token(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "Gate", Open)  # What pays depends on time.
    model, heads = tiny_checkpoint("llama", tmp_path / "model"), tmp_path / "heads.safetensors"
    medusa_1(heads, 64)
    options: Any = {"target": target, "dtype": "float32", "speculative": heads, **LIMITS}
    path = llmc.build(model, tmp_path / "e.llmc", **options).path
    prompts = [tiny_tokens(11), tiny_tokens(4)]
    with (
        llmc.load(path, executor="reference") as reference,
        llmc.load(path, executor=EXECUTED, speculation={"method": "medusa"}) as engine,
    ):
        assert tokens_of(engine, prompts, GREEDY) == tokens_of(reference, prompts, GREEDY)
        assert engine.loop.speculation is not None and engine.loop.speculation.stats.draft_tokens > 0


@gpus
def test_tokens_are_drawn_on_the_device(target: str, tmp_path: Path) -> None:
    """As from the same logits on the host, whose numbers are the same for a seed."""
    model = tiny_checkpoint("llama", tmp_path / "model")
    path = llmc.build(model, tmp_path / "e.llmc", target=target, dtype="float32", **LIMITS).path
    prompts = [tiny_tokens(12), tiny_tokens(5)]
    with llmc.load(path, executor="reference") as reference, llmc.load(path, executor=EXECUTED) as engine:
        for choice in ({"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {}):
            params = SamplingParams(max_tokens=4, temperature=0.8, seed=11, ignore_eos=True, **choice)
            assert tokens_of(engine, prompts, params) == tokens_of(reference, prompts, params)
