"""CPU and reference engines: a request's tokens and log-probabilities are the same bits in any company."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file, save_file

import llmc
from llmc import LLM, SamplingParams
from llmc.engines.engine_cache import engine_key, find_or_build_engine
from llmc.errors import CheckpointError, ModelFailureError, RequestError
from llmc.runtime.engine import Engine
from llmc.runtime.requests.completion import Completion
from tests.tiny_models import tiny_checkpoint

MODEL = Path(__file__).parent.parent.parent / "examples/models/bard-draft"


@dataclass(frozen=True)
class Numbers:
    """What an engine computes with."""

    dtype: str
    quantize: str = ""
    kv_cache: str = "auto"
    target: str = "cpu"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(Numbers("float32"), id="float32", marks=pytest.mark.slow),
        pytest.param(Numbers("bfloat16"), id="bfloat16"),
        pytest.param(Numbers("bfloat16", target="reference"), id="reference", marks=pytest.mark.slow),
        pytest.param(Numbers("float32", target="onnxruntime"), id="onnxruntime", marks=pytest.mark.slow),
        pytest.param(Numbers("bfloat16", "w8a8", "int8"), id="w8a8-kv8"),
        pytest.param(Numbers("bfloat16", "w4a8:g32", "int8"), id="w4a8-kv8", marks=pytest.mark.slow),
    ],
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("engine") / "engine.llmc"
    options = {**asdict(request.param), "max_model_len": 192, "max_sequences": 32, "max_batch_tokens": 96}
    llmc.build(MODEL, path, **options)
    return path


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with llmc.load(path, prefix_cache=False) as opened:
        yield opened


def halved(ids: list[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A user's function."""
    return logits * np.float32(1 - 0.5 / len(ids))


HOST_CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"bad_words": ["lord", "thou art"]},
    {"allowed_token_ids": tuple(range(7, 4000, 3))},
    {"typical_p": 0.8},
    {"logits_processors": (halved,)},
)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    chance = random.Random(0)
    prompts = [[chance.randrange(4096) for _ in range(chance.randint(1, 70))] for _ in range(32)]
    params = [
        SamplingParams(
            max_tokens=16,
            temperature=i % 3 * 0.6,
            seed=i,
            top_k=40 if i % 2 else None,
            logprobs=2,
            **HOST_CHOICES[i % len(HOST_CHOICES)],
        )
        for i in range(32)
    ]
    return prompts, params


def bits(completions: list[Completion]) -> list[object]:
    """Everything that was computed, to the last bit."""
    return [
        [(c.token_ids, [(p.logprob.hex(), p.top) for p in c.logprobs or ()]) for c in completion.choices]
        for completion in completions
    ]


def test_alone_in_batches_of_8_and_32_and_shuffled(engine: Engine) -> None:
    prompts, params = requests()
    alone = [bits(engine.generate([p], q))[0] for p, q in zip(prompts, params, strict=True)]
    assert bits(engine.generate(prompts, params)) == alone
    for start in range(0, 32, 8):
        part = slice(start, start + 8)
        assert bits(engine.generate(prompts[part], params[part])) == alone[part]
    order = random.Random(1).sample(range(32), 32)
    shuffled = engine.generate([prompts[i] for i in order], [params[i] for i in order])
    assert bits(shuffled) == [alone[i] for i in order]


def test_hits_misses_forks_and_preemption_change_no_bit(path: Path, engine: Engine) -> None:
    prompts, params = requests()
    stem = prompts[0] * 3
    asked = [[*stem[:64], *prompt[:9]] for prompt in prompts[:12]]
    several = [replace(q, n=2 + i % 2, temperature=0.9) for i, q in enumerate(params[:12])]
    wanted = [bits(engine.generate([p], q))[0] for p, q in zip(asked, several, strict=True)]
    block = engine.limits.block_size
    with llmc.load(path) as cached:
        first = cached.generate(asked, several)
        again = cached.generate(asked, several)
        assert bits(first) == bits(again) == wanted
        assert all(completion.cached_tokens >= 64 // block * block for completion in again)
    with pytest.raises(llmc.LlmcError, match="one sequence of max_model_len") as caught:
        llmc.load(path, kv_cache_bytes=1)
    needed = int(caught.value.problem.rsplit(" ", 1)[-1])
    with llmc.load(path, kv_cache_bytes=2 * needed) as tight:
        assert bits(tight.generate(asked, several)) == wanted
        assert tight.loop.scheduler.preemptions > 0


def test_not_a_number_stays_in_its_request(tmp_path: Path) -> None:
    """Blocks that have held NaNs are given to others, whose attention must not touch what they have not written."""
    file = tiny_checkpoint("llama", tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][13] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    path = tmp_path / "engine.llmc"
    llmc.build(tmp_path / "model", path, dtype="bfloat16", max_model_len=64, max_sequences=8, max_batch_tokens=64)
    chance = random.Random(0)
    prompts = [[chance.randrange(14, 160) for _ in range(chance.randint(1, 40))] for _ in range(8)]
    params = SamplingParams(max_tokens=12, ignore_eos=True, logit_bias={13: -100.0}, logprobs=1)
    with llmc.load(path, prefix_cache=False) as engine:
        wanted = bits(engine.generate(prompts, params))
        with pytest.raises(ModelFailureError):
            engine.generate([[13] * 50] * 8, params)
        assert bits(engine.generate(prompts, params)) == wanted
        with pytest.raises(ModelFailureError) as caught:
            engine.generate([*prompts[:4], [5, 13]], params)
        assert caught.value.at == "prompt 4"


def test_llm_generates_chats_and_finds_its_engine_again(own_cache: Path) -> None:
    params = SamplingParams(max_tokens=8)
    shipped = MODEL.parent / "bard-draft"
    with LLM(shipped, chat_template="plain", max_model_len=128) as model:
        built = model.engine.path
        assert built.is_relative_to(own_cache)
        stamp = (built / "manifest.json").stat().st_mtime_ns
        first, other = model.generate(["ROMEO:", "KING"], params)
        assert "".join(piece.text for piece in model.stream("ROMEO:", params)) == first.text
        talk = [{"role": "user", "content": "Who art thou?"}]
        (answer,) = model.chat(talk, params)
        assert answer == model.generate("User: Who art thou?\nAssistant:", params)[0]
        assert model.chat([talk, talk], params) == [answer, answer]
        assert "".join(piece.text for piece in model.stream_chat(talk, params)) == answer.text
        with pytest.raises(RequestError, match="a conversation is a list of messages"):
            model.chat("Hello", params)  # type: ignore[arg-type]
    with LLM(shipped, max_model_len=128, kv_memory=0.01) as model:
        assert model.engine.path == built and (built / "manifest.json").stat().st_mtime_ns == stamp, "found, not built"
        assert model.generate(["ROMEO:", "KING"], params) == [first, other]
        with pytest.raises(RequestError, match="without a chat template"):
            model.chat(talk, params)
    with llmc.load(built) as engine, LLM(engine) as model:
        assert model.generate("ROMEO:", params) == [first]


def test_the_key_follows_everything_that_makes_an_engine(own_cache: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_checkpoint("llama", model)
    key = engine_key(model, "cpu", {})
    assert key == engine_key(model, "cpu", {})
    assert key != engine_key(model, "cpu-portable", {})
    assert key != engine_key(model, "cpu", {"max_model_len": 64})
    text = tmp_path / "text.txt"
    options = {"quantize": "int4-gptq", "calibration": str(text)}
    text.write_text("one", encoding="utf-8")
    calibrated = engine_key(model, "cpu", options)
    text.write_text("another", encoding="utf-8")
    assert calibrated != engine_key(model, "cpu", options)
    config = model / "config.json"
    config.write_text(config.read_text() + "\n")
    assert key != engine_key(model, "cpu", {})
    with pytest.raises(CheckpointError, match="neither an engine nor a model directory"):
        find_or_build_engine(tmp_path)


@pytest.mark.slow
def test_the_key_is_the_same_in_every_process(own_cache: Path, tmp_path: Path) -> None:
    """Whatever order sets have there."""
    model = tiny_checkpoint("llama", tmp_path / "model")
    code = "import sys; from pathlib import Path; from llmc.engines.engine_cache import engine_key as key\n"
    code += "print(*(key(Path(sys.argv[1]), target, {}) for target in ('cpu', 'cpu-portable', 'h100,a100')))"
    keys = {
        subprocess.run(
            [sys.executable, "-c", code, str(model)],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(2)
    }
    assert len(keys) == 1 and len(set(keys.pop().split())) == 3
