"""One of each family, and models that give a row for a text, in bf16 and with int8 weights: as near to fp32 as the
numbers allow."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import llmc
from llmc.architectures.tiny_config import tiny_architecture
from tests.heads.tiny_texts import MODELS, rows_of, texts, tiny_model

EXPERTS = ("mixtral", "gpt_oss", "qwen3_moe", "llama4_text", "deepseek_v3+groups", "granitemoe", "dbrx", "nemotron_h")
LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "deepseek_v32")
STATES = (
    *("mamba", "falcon_mamba", "jamba", "zamba", "mamba2", "bamba", "falcon_h1", "zamba2", "lfm2", "recurrent_gemma"),
    *("qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "minimax", "rwkv", "xlstm"),
)
WINDOWS = (
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_neo",
    "llama4_text",
    "cohere2",
    "modernbert-decoder",
    "gemma3n_text",
)
OTHERS = (
    *("bloom", "mpt", "falcon+alibi", "opt", "openai-gpt", "ministral3", "bart", "whisper", "bert", "roformer"),
    *("gemma4_text", "gemma4_text+keys_as_values", "inkling_text"),
)
FAMILIES = tuple(dict.fromkeys((*EXPERTS, *LATENTS, *STATES, *WINDOWS, *OTHERS)))
LENGTHS = (70, 33, 7)
TEXTS = range(2, 90, 6)

# How many times as far off fp32 an engine in bf16 may be as torch in bf16 is.
BF16 = 1.25
# How many times as far off fp32 an engine of int8 codes may be as torch with the same rows rounded.
INT8 = 1.15
# A compiled int8 engine against its reference, which reads the same codes: sums in another order.
SAME_CODES = 1e-3

Logits = npt.NDArray[np.float32]


def prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(3, 150) for _ in range(length)] for length in LENGTHS]


def experts_of(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all experts of a layer are one."""
    modules = [module for module in model.modules() if not isinstance(module, nn.Conv1d)]
    return [p for module in modules for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]


def round_rows(model: nn.Module) -> None:
    """Leave of products' and experts' weights what codes of int8 hold, with a scale a row."""
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    lying = [module.weight for module in model.modules() if isinstance(module, Conv1D)]
    rows = {id(module): (module, -1) for module in (*linear, *experts_of(model))} | {
        id(module): (module, 0) for module in lying
    }
    for weight, inputs in rows.values():
        scale = weight.detach().abs().amax(inputs, keepdim=True) / 127
        weight.data = (weight.detach() / scale).round() * scale


def torch_logits(model: Any) -> Logits:
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([p]), use_cache=False).logits[0].float().numpy() for p in prompts()]
    return np.concatenate(logits)


def engine_logits(model: Any, path: Path, **options: Any) -> Logits:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", llmc.errors.BuildWarning)
        llmc.build(model, path, max_model_len=128, **options)
    with llmc.load(path) as engine:
        return np.concatenate(engine.logits(prompts()))


def deviation(ours: Logits, theirs: Logits) -> float:
    """The root mean square difference over the spread."""
    return float(np.sqrt(np.square(ours - theirs).mean()) / theirs.std())


def deviation_in_the_middle(ours: Logits, theirs: Logits) -> float:
    """As `deviation`, of the token that half of all others exceed: routers of random weights have near ties, and a
    token that goes to another expert is off by what the expert says."""
    return float(np.median(np.sqrt(np.square(ours - theirs).mean(axis=-1))) / theirs.std())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16(name: str, tmp_path: Path) -> None:
    model = tiny_architecture(name).to(torch.bfloat16)
    ours = engine_logits(model, tmp_path / "engine.llmc", dtype="bfloat16")
    # transformers' xLSTM multiplies fp32 with bf16, which torch does not without autocast.
    with torch.autocast("cpu", torch.bfloat16, enabled=name == "xlstm"):
        theirs = torch_logits(model)
    # The same weights, rounded once, in fp32 arithmetic.
    exact = torch_logits(model.float())
    measure = deviation_in_the_middle if experts_of(model) else deviation
    error, torch_error = measure(ours, exact), measure(theirs, exact)
    assert error <= BF16 * torch_error, f"{error:.4f} of the spread off fp32, torch in bf16 {torch_error:.4f}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_int8_weights(name: str, tmp_path: Path) -> None:
    model = tiny_architecture(name)
    expected = torch_logits(model)
    options = {"dtype": "float32", "quantize": "int8"}
    compiled = engine_logits(model, tmp_path / "cpu.llmc", target="cpu", **options)
    reference = engine_logits(model, tmp_path / "reference.llmc", target="reference", **options)
    assert deviation(compiled, reference) <= SAME_CODES
    round_rows(model)
    error, torch_error = (deviation_in_the_middle(logits, expected) for logits in (compiled, torch_logits(model)))
    assert 0 < error <= INT8 * torch_error, (
        f"{error:.4f} of the spread off fp32, torch with rounded rows {torch_error:.4f}"
    )


def engine_rows(model: Any, target: str = "cpu", **options: Any) -> Logits:
    with llmc.compile(model, target=target, max_batch_tokens=96, **options) as engine:
        return np.stack(engine.completer.rows(texts(TEXTS), False))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_rows_in_bf16(name: str) -> None:
    model = tiny_model(name).to(torch.bfloat16)
    ours, theirs = engine_rows(model, dtype="bfloat16"), rows_of(model, texts(TEXTS))
    exact = rows_of(model.float(), texts(TEXTS))
    error, torch_error = deviation(ours, exact), deviation(theirs, exact)
    assert error <= BF16 * torch_error, f"{error:.4f} of the spread off fp32, torch in bf16 {torch_error:.4f}"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_rows_with_int8_weights(name: str) -> None:
    model = tiny_model(name)
    compiled, reference = (
        engine_rows(model, target, dtype="float32", quantize="int8") for target in ("cpu", "reference")
    )
    expected = rows_of(model, texts(TEXTS))
    # Over their size: the scores of a model of noise are nearly those of any other text.
    size = float(np.sqrt(np.square(expected).mean()))
    assert np.abs(compiled - reference).max() <= SAME_CODES * size
    round_rows(model)
    error, torch_error = (float(np.abs(rows - expected).mean()) for rows in (compiled, rows_of(model, texts(TEXTS))))
    assert 0 < error <= INT8 * torch_error, f"{error:.4f} off fp32, torch with rounded rows {torch_error:.4f}"
