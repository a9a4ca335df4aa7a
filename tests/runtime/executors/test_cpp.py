"""The compiled executor through the real C interface, and the scheduler's arrays as a library reads them."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.errors import EngineFormatError
from llmc.runtime.executors.cpp import ENGINE_ABI
from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from tests.runtime.executors.context_engine import (
    LIMITS,
    SOURCE,
    VOCAB,
    compile_library,
    continuation,
    next_token,
    write_context_engine,
)

ONE_SEQUENCE = 5 * 8 * 12  # Five blocks of eight positions, three floats each.


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    compile_library(folder / "engine.so")
    return write_context_engine(folder / "context.llmc", folder / "engine.so")


prompts = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24), min_size=1, max_size=8)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(prompts, st.integers(1, 12), st.integers(1, 3), st.integers(1, 12))
def test_every_token_was_read_from_its_place(
    path: Path, batch: list[list[int]], step_tokens: int, pool: int, count: int
) -> None:
    with load(path, max_step_tokens=step_tokens, kv_cache_bytes=pool * ONE_SEQUENCE, threads=1) as engine:
        completions = engine.generate(batch, SamplingParams(max_tokens=count))
        assert [list(c.token_ids) for c in completions] == [continuation(p, count) for p in batch]
        rows = engine.logits(batch[0])
        assert rows.argmax(-1).tolist() == [next_token(batch[0][: i + 1]) for i in range(len(batch[0]))]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(prompts, st.integers(1, 3), st.integers(2, 12), st.booleans())
def test_forks_read_their_own_copies(path: Path, batch: list[list[int]], pool: int, count: int, beams: bool) -> None:
    """What the engine finds likeliest tells what it has read, whatever token was drawn."""
    if beams:
        params = SamplingParams(max_tokens=count, n=3, beam_width=3, logprobs=1)
    else:
        params = SamplingParams(max_tokens=count, n=5, temperature=4.0, seed=1, logprobs=1)
    with load(path, kv_cache_bytes=pool * ONE_SEQUENCE, threads=1) as engine:
        for prompt, completion in zip(batch, engine.generate(batch, params), strict=True):
            assert len({choice.token_ids for choice in completion.choices}) > 1
            for choice in completion.choices:
                assert choice.logprobs is not None
                likeliest = [logprob.top[0][0] for logprob in choice.logprobs]
                assert likeliest == [next_token([*prompt, *choice.token_ids[:i]]) for i in range(len(likeliest))]
        assert engine.loop.pool.used == 0


def test_a_sequence_of_full_length(path: Path) -> None:
    prompt = list(range(30))
    with load(path) as engine:
        (full,) = engine.generate(prompt, SamplingParams(max_tokens=99))
        assert list(full.token_ids) == continuation(prompt, LIMITS.max_model_len - 30)


def test_a_forgotten_engine_is_closed(tmp_path: Path) -> None:
    log = tmp_path / "closed"
    source = SOURCE.replace("delete engine;", f'delete engine; fclose(fopen("{log}", "w"));')
    compile_library(tmp_path / "engine.so", f"#include <stdio.h>\n{source}")
    write_context_engine(tmp_path / "e.llmc", tmp_path / "engine.so")
    load(tmp_path / "e.llmc").generate([1], SamplingParams(max_tokens=1))
    gc.collect()
    assert log.exists()


def test_too_many_threads_for_the_library(path: Path) -> None:
    with pytest.raises(EngineFormatError, match="could not start with 10 threads"):
        load(path, threads=10)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("return LLMC_ENGINE_ABI", "return 99", f"the library has interface 99, but this llmc needs {ENGINE_ABI}"),
        ("llmc_engine_step", "llmc_other_step", "cannot be loaded"),
    ],
)
def test_libraries_of_another_interface(tmp_path: Path, old: str, new: str, problem: str) -> None:
    compile_library(tmp_path / "engine.so", SOURCE.replace(old, new))
    engine = write_context_engine(tmp_path / "e.llmc", tmp_path / "engine.so")
    with pytest.raises(EngineFormatError, match=problem) as caught:
        load(engine)
    assert caught.value.at is not None and "kernels/engine-" in caught.value.at


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "engine.so").write_text("not ELF")
    with pytest.raises(EngineFormatError, match="cannot be loaded"):
        load(write_context_engine(tmp_path / "e.llmc", tmp_path / "engine.so"))


def test_generating_imports_neither_torch_nor_transformers(path: Path) -> None:
    script = f"""
import sys
import llmc
with llmc.load({str(path)!r}) as engine:
    assert engine.generate([1, 2, 3], llmc.SamplingParams(max_tokens=3, temperature=0.5, seed=1))
loaded = [m for m in ("torch", "transformers", "pydantic", "sympy", "networkx") if m in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=path.parent)
