"""An engine for two GPUs, built without one: each has its own kernels, and the right ones are found."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import llmc
import llmc.targets
from llmc.cli.build import summary_table
from llmc.cli.units import in_bytes
from llmc.codegen.triton.compile import Workers
from llmc.compiler import build
from llmc.engine_format import EngineDirectory, read_engine
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.engine_format.kept_ptx import kept_binaries, read_ptx
from llmc.errors import EngineFormatError, OptionError, TargetError
from llmc.program import DeviceKernel
from llmc.report.build_report import BuildReport
from llmc.report.machine_code import kernel_budgets
from llmc.runtime.device.binaries import binaries_for
from llmc.runtime.device.device import Device
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.settings import settings
from llmc.targets import GPU_TARGETS, gpu_target
from tests.cli.command import MODEL, assert_user_error
from tests.cli.command import llmc as command
from tests.cli.test_table import printed
from tests.tiny_models import tiny_checkpoint

# Steps of two tokens need few kernels.
EXECUTORS: tuple[ExecutorName, ...] = ("reference", "ptx")
LIMITS: dict[str, Any] = {"max_model_len": 64, "max_batch_tokens": 2, "max_sequences": 2, "max_logit_rows": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint("llama", tmp_path_factory.mktemp("model") / "model"))


@pytest.fixture(scope="module")
def report(model: str, tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    path = tmp_path_factory.mktemp("two") / "e.llmc"
    words = Tokenizer(WordLevel({"KING": 5, "RICHARD": 7}, unk_token="KING"))
    return build(model, path, target="a100,h100", dtype="bfloat16", tokenizer=words, **LIMITS)


@pytest.fixture(scope="module")
def engine(report: BuildReport) -> EngineDirectory:
    return read_engine(report.path, check_machine=False)


def test_a_build_says_how_many_sequences_fit(report: BuildReport) -> None:
    facts = [line.strip("│ ").split("│") for line in printed(summary_table(report), 120).splitlines() if "│" in line]
    told = {name.strip(): value.strip() for name, value in facts}
    assert told["sequences of full length that fit"] == str(report.fitting_sequences)


def test_a_model_that_the_gpu_cannot_hold_is_refused_before_compiling(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*arguments: object) -> None:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr(Workers, "compile", compiled)
    small = tuple(replace(t, memory_bytes=10**9) if t.name == "l4" else t for t in GPU_TARGETS)
    monkeypatch.setattr(llmc.targets.names, "GPU_TARGETS", small)
    with pytest.raises(OptionError) as caught:
        llmc.build(model, tmp_path / "e.llmc", target="l4", dtype="bfloat16", **LIMITS)
    match = re.fullmatch(
        r"the engine needs ([\d.]+) GB, and l4 has 1\.00 GB: weights ([\d.]+) GB \+ "
        r"KV cache of 2 sequences of 64 tokens ([\d.]+) GB \+ arena ([\d.]+) GB \+ logits ([\d.]+) GB \+ "
        r"([\d.]+) GB for the driver",
        caught.value.problem,
    )
    assert match is not None, caught.value.problem
    total, *parts = map(float, match.groups())
    assert total == pytest.approx(sum(parts), abs=0.03)
    assert not (tmp_path / "e.llmc").exists()


def test_each_target_has_its_own_program(engine: EngineDirectory) -> None:
    assert [target_program.target for target_program in engine.programs] == ["a100", "h100"]
    a100, h100 = (target_program.program for target_program in engine.programs)
    assert a100.weights == h100.weights
    for program, arch, folder in ((a100, "sm_80", "kernels/a100"), (h100, "sm_90", "kernels/h100")):
        for kernel in program.launched_kernels():
            assert set(kernel.binaries) == {arch}
            assert kernel.binaries[arch].file.startswith(folder)
            assert (engine.path / kernel.binaries[arch].file).read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("name", "capability", "arch"), [("NVIDIA H100", (9, 0), "sm_90"), ("NVIDIA A10", (8, 6), "sm_80")]
)
def test_a_device_gets_its_own(engine: EngineDirectory, name: str, capability: tuple[int, int], arch: str) -> None:
    told: list[str] = []
    binaries = binaries_for(engine, Device(0, name, capability, 1), told.append)
    assert (binaries.arch, told) == (arch, [])
    assert binaries.program == engine.programs[arch == "sm_90"].program


def test_inspect_shows_machine_code_beside_budgets(engine: EngineDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    shown = command("inspect", engine.path, "--sass").out
    for arch in ("sm_80", "sm_90"):
        assert re.search(rf"machine code for {arch}: \d+ of \d+ figures of \d+ kernels miss budgets", shown)
    assert "exits before wait" in shown and "stack bytes" not in shown
    assert "stack bytes" in command("inspect", engine.path, "--sass", "--all").out


@pytest.mark.slow
def test_the_report_has_the_figures_that_inspect_shows(engine: EngineDirectory) -> None:
    budgets = kernel_budgets(engine)
    for program in engine.programs:
        arch = gpu_target(program.target).arch_name
        rows = [row for by_arch in budgets.values() for row in by_arch.get(arch, ())]
        shown = command("inspect", engine.path, "--sass", "--all").out
        kernels = sum(arch in by_arch for by_arch in budgets.values())
        missed = sum(not row.is_met for row in rows)
        assert f"machine code for {arch}: {missed} of {len(rows)} figures of {kernels} kernels" in shown


def test_inspect_shows_both(engine: EngineDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    shown = command("inspect", engine.path)
    assert shown.code == 0, shown.err
    assert "matmul" in shown.out
    assert "one request at context 64" in shown.out, "there is no longer one"
    for program in engine.programs:
        title = f"on {program.target}, predicted and not measured"
        assert title in " ".join(shown.out.split())
        table = shown.out[shown.out.index(title) :].partition("choices for")[0]
        rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in table.splitlines() if "│" in line]
        (arch,) = {"a100": ["sm_80"], "h100": ["sm_90"]}[program.target]
        resources = {row[0]: row[2:6] for row in rows if row[1] == arch}
        assert resources == {
            kernel.name: [str(b.threads), str(b.registers), str(b.spill_bytes), in_bytes(b.shared_bytes)]
            for kernel in program.program.launched_kernels()
            for b in kernel.binaries.values()
        }
        assert all(int(registers) > 0 for _, registers, *_ in resources.values())
        assert any(shared != "0 B" for *_, shared in resources.values())
        # Three gathers of a row: 64 channels in bf16 read and written, and an index. Starting them is what takes time.
        gathered = [row[6:] for row in rows if row[0].startswith("gather_rows_kernel")]
        assert gathered == [["780 B", "6.0 µs"]]
    monkeypatch.setenv("COLUMNS", "80")
    narrow = command("inspect", engine.path)
    assert max(map(len, narrow.out.splitlines())) <= 80
    assert "left out at 80 columns: for, threads" in narrow.out
    names = {kernel.name for listed in engine.programs for kernel in listed.program.launched_kernels()}
    assert names <= set(narrow.out.split()), "a kernel's name was broken"
    prefill = command("inspect", engine.path, "--prefill", "2")
    assert "prefill of 2 tokens on" in " ".join(prefill.out.split())


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a device nor the interpreter that the tests use in its place."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_without_its_gpu_an_engine_can_be_looked_at_and_saved(
    engine: EngineDirectory, without_a_gpu: None, tmp_path: Path
) -> None:
    with llmc.load(engine.path) as opened:
        assert opened.report().read_text(encoding="utf-8").startswith("<!doctype html>")
        assert "2 of 2 attentions paged" in opened.explain()
        decode, prefill = opened.predict(requests=2, context=32), opened.predict(prefill=2)
        assert decode.target == "a100" and decode.bytes_moved > opened.manifest.memory["weights"] / 2
        assert 0 < decode.bandwidth_share < 1 and sum(decode.kernel_seconds.values()) == pytest.approx(decode.seconds)
        assert prefill.step == "prefill of 2 tokens"
        assert opened.save(tmp_path / "copy.llmc").is_dir()
        limits = opened.limits
        assert limits.max_model_len < 1024
        assert f"context {limits.max_model_len}" in opened.predict().step
        for wrong in (
            {"requests": 0},
            {"requests": limits.max_sequences + 1},
            {"context": limits.max_model_len + 1},
            {"prefill": limits.max_batch_tokens + 1},
        ):
            with pytest.raises(OptionError, match=f"{next(iter(wrong))} cannot be"):
                opened.predict(**wrong)


@pytest.mark.parametrize("call", ["generate", "stream", "logits", "loop"])
def test_what_needs_the_gpu_says_so_when_it_is_called(engine: EngineDirectory, without_a_gpu: None, call: str) -> None:
    with llmc.load(engine.path) as opened, pytest.raises(TargetError, match="there is none to run it on") as caught:
        if call == "generate":
            opened.generate([[5, 9]])
        elif call == "stream":
            next(opened.stream([5, 9]))
        elif call == "logits":
            opened.logits([5, 9])
        else:
            llmc.AsyncEngine(opened)
    fix = str(caught.value.fix)
    assert "llmc run e.llmc --prompt" in fix and 'executor="reference"' in fix


def test_an_executor_is_asked_for_by_name(engine: EngineDirectory, model: str, without_a_gpu: None) -> None:
    """The graph that a GPU engine carries gives the bits of an engine that was built for the reference."""
    built = llmc.compile(model, target="reference", dtype="bfloat16", **LIMITS)
    with built, llmc.load(engine.path, executor="reference") as carried:
        tokens = [5, 9, 77, 3, 150]
        assert np.array_equal(carried.logits(tokens), built.logits(tokens))
        with pytest.raises(OptionError, match="an engine for reference is run by reference, not by 'cuda'"):
            llmc.load(built.path, executor="cuda")
    with pytest.raises(TargetError, match="there is none to run it on"):
        llmc.load(engine.path, executor="cuda")
    with pytest.raises(OptionError, match="there is no executor 'torch'"):
        llmc.load(engine.path, executor="torch")  # type: ignore[arg-type]


def test_the_command_line_runs_it_by_name(engine: EngineDirectory, without_a_gpu: None) -> None:
    refused = command("run", engine.path, "--prompt", "KING", "--max-tokens", "2")
    assert_user_error(refused, "there is none to run it on", "--executor reference")
    assert refused.out == ""
    done = command("run", engine.path, "--prompt", "KING", "--max-tokens", "2", "--executor", "reference")
    assert done.code == 0 and done.out.startswith("KING"), done
    assert_user_error(command("run", MODEL, "-p", "KING", "--executor", "torch"), "no executor 'torch'")


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    [
        "int8",
        *(f"int{b}:channel{z}" for b in (4, 5, 6) for z in ("", ":asym")),
        "w8a8:x32",
        "q4_k,*.down_proj=int8",
        "fp8",
    ],
)
def test_codes_are_had_back_from_the_layouts_of_gpu_kernels(model: str, scheme: str, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"dtype": "float32", "quantize": scheme, **LIMITS}
    build(model, tmp_path / "gpu.llmc", target="h100", **chosen)
    built = llmc.compile(model, target="reference", **chosen)
    with built, llmc.load(tmp_path / "gpu.llmc", executor="reference") as carried:
        assert np.array_equal(carried.logits([5, 9, 77]), built.logits([5, 9, 77]))


@pytest.mark.parametrize(("target", "place"), [("a100", 0), ("h100", 1)])
def test_ptx_is_kept_beside_each_binary(engine: EngineDirectory, target: str, place: int) -> None:
    program = engine.programs[place].program
    kept = kept_binaries(program, engine.path)
    assert set(kept) == {kernel.name for kernel in program.launched_kernels() if not kernel.is_library}
    for binary in kept.values():
        assert binary.assembly == binary.file.removesuffix(".cubin") + ".ptx.gz"
        text = read_ptx(engine.files, binary.assembly)
        assert f".entry {binary.entry}(" in text and ".loc" in text
        assert str(Path.home()) not in text and "site-packages" not in text


def test_an_engine_is_executed_by_its_ptx(engine: EngineDirectory) -> None:
    prompt, greedy = [5, 9, 2], SamplingParams(max_tokens=2, temperature=0.0)
    answers = []
    for executor in EXECUTORS:
        with llmc.load(engine.path, executor=executor) as opened:
            answers.append(opened.generate([prompt], greedy)[0].choices[0].token_ids)
    assert answers[0] == answers[1]


def test_opcodes_are_listed(engine: EngineDirectory) -> None:
    outcome = command("ptx", engine.path)
    assert outcome.code == 0 and "0 are unknown" in outcome.out and "ld.global" in outcome.out
    uses = json.loads(command("ptx", engine.path, "--json").out)
    assert {"opcode", "uses", "kernels", "first", "refused"} == set(uses[0])
    assert json.loads(command("ptx", engine.path, "--json", "--unknown").out) == []


def test_an_engine_without_ptx_says_how_to_get_it(engine: EngineDirectory) -> None:
    def without(kernel: DeviceKernel) -> DeviceKernel:
        return replace(kernel, binaries={a: replace(b, assembly=None) for a, b in kernel.binaries.items()})

    program = engine.program
    older = replace(program, kernels=tuple(map(without, program.kernels)))
    with pytest.raises(EngineFormatError, match="has no PTX") as caught:
        kept_binaries(older, engine.path)
    assert caught.value.at == str(engine.path) and "rebuild it" in str(caught.value.fix)


def test_a_missing_program_is_noticed(engine: EngineDirectory) -> None:
    path = engine.path / "programs/h100.json"
    text = path.read_text()
    path.write_text(text + " ")
    try:
        with pytest.raises(EngineFormatError, match=r"too long|hash"):
            read_engine(engine.path, check_machine=False)
    finally:
        path.write_text(text)


@pytest.mark.slow
def test_half_precision_checkpoints_are_kept_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(tiny_checkpoint("llama", tmp_path / "model", torch.float16))
    build(model, tmp_path / "gpu.llmc", target="a100", **LIMITS)
    engine = read_engine(tmp_path / "gpu.llmc", check_machine=False)
    assert engine.manifest.model.dtype == "float16"
    assert {slot.dtype for slot in engine.program.weights} == {"F16", "F32"}
    assert {cache.dtype for cache in engine.program.caches} == {"F16"}
    left_alone = json.loads((engine.path / "report/lowering.json").read_text())
    assert left_alone and all("more than fp16 holds" in norm["reason"] and norm["node"] for norm in left_alone)
    compiled_once(engine, tmp_path / "cache", monkeypatch)


def compiled_once(engine: EngineDirectory, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a GPU that none of the engine's binaries fits: from the carried sources, kept whole, said once."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(cache))
    settings.cache_clear()
    told: list[str] = []
    hopper = Device(0, "NVIDIA H100", (9, 0), 227 * 1024)
    first = binaries_for(engine, hopper, told.append)
    assert first.arch == "sm_90" and first.program.launches == engine.program.launches
    assert len(told) == 1 and "the engine carries kernels for sm_80" in told[0]
    for kernel in first.program.launched_kernels():
        assert (first.directory / kernel.binaries["sm_90"].file).read_bytes().startswith(b"\x7fELF")
    assert binaries_for(engine, hopper, told.append) == first
    assert len(told) == 1
    assert list(first.directory.parent.iterdir()) == [first.directory], "nothing unfinished is left"
    settings.cache_clear()
