"""Whole steps of compiled tiny models: equal to the eager graph in mixed batches, without allocation, reproducible."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmc.codegen.cpp.lowering import lower
from llmc.codegen.cpp.toolchain import find_toolchain, run_tool
from llmc.frontends.checkpoints.memory_source import MemorySource
from llmc.graph.execute import Chunk, run_steps
from llmc.graph.model_graph import ModelGraph
from llmc.options import BuildOptions
from llmc.program.program_json import program_from_json, program_to_json
from llmc.settings import settings
from llmc.targets import CpuTarget, host_target
from tests.cache_beside import cache_beside
from tests.codegen.cpp.runnable_targets import RUNNABLE
from tests.codegen.engine_harness import OpenEngine, compile_engine, packed_weights, run_engine
from tests.codegen.tiny_models import VOCABULARY, gemma2, gpt2, llama
from tests.tolerances import CPU_STEPS

Model = Callable[[torch.dtype], tuple[ModelGraph, MemorySource]]

TOKENS = tuple((i * 31 + 7) % VOCABULARY for i in range(40))
# Two sequences: prefill together, then a chunk beside a single token, then a decode of both, then a chunk alone.
MIXED_STEPS = (
    (Chunk(0, 0, TOKENS[:20]), Chunk(1, 0, TOKENS[5:8])),
    (Chunk(1, 3, TOKENS[8:20]), Chunk(0, 20, TOKENS[20:21])),
    (Chunk(0, 21, TOKENS[21:22]), Chunk(1, 15, TOKENS[20:21])),
    (Chunk(1, 16, TOKENS[21:40]),),
)
# Of the root-mean-square difference. bf16: sums in another order round to the neighbouring bf16 here and there.


def assert_equal_logits(
    graph: ModelGraph, source: MemorySource, target: CpuTarget, directory: Path, tolerance: float, threads: int = 1
) -> None:
    """The compiled engine gives the eager graph's logits, within a share of their spread."""
    lowered = lower(graph, target, BuildOptions())
    got = run_engine(lowered, source, MIXED_STEPS, target, directory, threads)
    want = run_steps(graph, source, MIXED_STEPS)
    for got_step, want_step in zip(got, want, strict=True):
        for ours, reference in zip(got_step, want_step, strict=True):
            difference = (ours - reference).square().mean().sqrt().item()
            assert difference <= tolerance * reference.std().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("model", [llama, gpt2, gemma2], ids=lambda m: m.__name__)
def test_equals_the_graph(model: Model, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_equal_logits(*model(dtype), host_target(), tmp_path, CPU_STEPS[dtype])


def test_equals_the_graph_on_two_threads(tmp_path: Path) -> None:
    assert_equal_logits(*gemma2(torch.float32), host_target(), tmp_path, CPU_STEPS[torch.float32], threads=2)


@pytest.mark.parametrize("target", RUNNABLE[1:])
def test_equals_the_graph_on_other_targets(target: CpuTarget, tmp_path: Path) -> None:
    assert_equal_logits(*gemma2(torch.float32), target, tmp_path, CPU_STEPS[torch.float32])


def test_only_requested_rows_get_logits(tmp_path: Path) -> None:
    graph, source = gemma2()
    lowered = lower(graph, host_target(), BuildOptions())
    library = compile_engine(lowered, host_target(), tmp_path)
    chunks = (Chunk(0, 0, TOKENS[:20]), Chunk(1, 0, TOKENS[5:8]))
    want = torch.cat(run_steps(graph, source, [chunks])[0])
    with OpenEngine(library, lowered.program, packed_weights(lowered, source), 2, 4, threads=1) as engine:
        assert engine.logits(chunks, ()).shape == (0, VOCABULARY)
        torch.testing.assert_close(engine.logits(chunks, (22, 3)), want[[22, 3]], rtol=1e-5, atol=1e-5)


@pytest.fixture
def use_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """`use_cache(name)`: from now on a cache of that name, with kernels and, at first, without code of engines."""
    caches = {name: cache_beside(tmp_path / name) for name in ("one", "another")}

    def use(name: str) -> Path:
        monkeypatch.setenv("LLMC_CACHE_DIR", str(caches[name]))
        settings.cache_clear()
        return caches[name]

    yield use
    settings.cache_clear()


def test_same_inputs_give_the_same_bytes(tmp_path: Path, use_cache: Callable[[str], Path]) -> None:
    texts, libraries = [], []
    for name, cache in (("first", "one"), ("a/second", "another")):
        use_cache(cache)
        lowered = lower(gemma2()[0], host_target(), BuildOptions())
        library = compile_engine(lowered, host_target(), tmp_path / name)
        texts.append(lowered.source + program_to_json(lowered.program))
        libraries.append(library.read_bytes())
    assert texts[0] == texts[1]
    assert libraries[0] == libraries[1]
    assert str(tmp_path).encode() not in libraries[0]


def test_code_is_compiled_once_and_again_if_it_changed_or_was_damaged(
    tmp_path: Path, use_cache: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, compiled = use_cache("one") / "programs", list[str]()

    def counted(command: list[str | Path], *, source: Path, scratch: Path) -> None:
        compiled.append(str(source))
        run_tool(command, source=source, scratch=scratch)

    monkeypatch.setattr("llmc.codegen.cpp.build.run_tool", counted)
    lowered = lower(gemma2()[0], host_target(), BuildOptions())
    first = compile_engine(lowered, host_target(), tmp_path / "first")
    assert len(compiled) == 2, "compiled and linked"
    assert compile_engine(lowered, host_target(), tmp_path / "second").read_bytes() == first.read_bytes()
    assert len(compiled) == 2
    (entry,) = programs.glob("*/engine.so")
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    assert compile_engine(lowered, host_target(), tmp_path / "third").read_bytes() == first.read_bytes()
    assert len(compiled) == 4
    compile_engine(replace(lowered, source=lowered.source + "\n"), host_target(), tmp_path / "fourth")
    assert len(compiled) == 6


def test_only_the_interface_is_visible(tmp_path: Path) -> None:
    library = compile_engine(lower(gemma2()[0], host_target(), BuildOptions()), host_target(), tmp_path)
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    functions = ("abi", "interface", "open", "step", "choose", "close", "time_launches", "ranks_bytes")
    assert names == {f"llmc_engine_{name}" for name in functions}


@pytest.mark.slow
def test_a_step_allocates_nothing(tmp_path: Path) -> None:
    counter = tmp_path / "counter.so"
    source = Path(__file__).with_name("count_allocations.cpp")
    subprocess.run([*find_toolchain().compiler, "-shared", "-fPIC", "-O1", source, "-o", counter], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.codegen.count_step_allocations", str(counter), str(tmp_path)],
        env={**os.environ, "LD_PRELOAD": str(counter)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["1", "0", "0", "0", "0"], done.stderr


def test_program_survives_json() -> None:
    program = lower(gemma2()[0], host_target(), BuildOptions()).program
    assert program_from_json(program_to_json(program), Path("program.json")) == program
