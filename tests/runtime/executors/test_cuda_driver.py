"""Launches through the real cuda-bindings and a library that stands in for the driver: what arrives there.

A kernel's parameters are those of its PTX, so that what Triton compiled and what is packed for it cannot differ.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmc.codegen.cpp.toolchain import find_toolchain
from llmc.codegen.triton.compile import CompiledKernel
from llmc.codegen.triton.launch_alternatives import with_every_buffer
from llmc.codegen.triton.lowering import lower_device
from llmc.options import BuildOptions
from llmc.program import DeviceKernel, Launch, Program
from llmc.runtime.device.arguments import argument_values, extra_pointers
from llmc.runtime.device.inputs import StepShape
from llmc.runtime.device.program import plan_calls
from tests.codegen.tiny_models import GraphBuilder, ops
from tests.gpu_target import gpu_target
from tests.kept_compiler import KeptCompiler
from tests.runtime.device.device_program import binary

HERE = Path(__file__).parent
SHAPE = StepShape(tokens=200, logit_rows=3, requests=5, max_blocks=64)
SCRATCH = 5 << 44

needs_bindings = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="cuda-bindings is not installed: pip install 'llmc-compiler[gpu]'",
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1 that records."""
    folder = tmp_path_factory.mktemp("driver")
    command = [*find_toolchain().compiler, "-shared", "-fPIC", "-O0", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(HERE / "recording_driver.cpp")], check=True)
    return folder


def launched(driver: Path, tmp_path: Path, **request: Any) -> tuple[list[list[str]], str]:
    """The recorded lines, and what the process printed."""
    record = tmp_path / "launches"
    widths = ",".join(map(str, request.pop("widths", ())))
    environment = os.environ | {"LAUNCHES": str(record), "WIDTHS": widths, "LD_LIBRARY_PATH": str(driver)}
    arguments = json.dumps({"directory": str(tmp_path), **request})
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.executors.launch_through_bindings", arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    lines = record.read_text().splitlines() if record.exists() else []
    return [line.split() for line in lines], done.stdout


def given(file: Path, **changes: Any) -> dict[str, Any]:
    file.write_bytes(b"\x7fELF" + bytes(60))
    return asdict(replace(binary("sm_90"), file=file.name, **changes))


@needs_bindings
def test_a_launch_arrives_as_it_was_asked_for(driver: Path, tmp_path: Path) -> None:
    values = [(1 << 60).to_bytes(8, "little"), (-3).to_bytes(4, "little", signed=True) + bytes(4)]
    record, printed = launched(
        driver,
        tmp_path,
        binary=given(tmp_path / "k.cubin", shared_bytes=100 * 1024),
        grid=[70000, 2, 3],
        stream=0x7F00,
        values=[value.hex() for value in values],
        widths=(8, 4),
    )
    assert not printed
    load, function, attribute, launch = record
    assert load == ["load", "ELF"]
    assert function == ["function", "0x1000", "k"]
    # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert attribute == ["attribute", "0x2000", "8", str(100 * 1024)]
    grid_and_block = ["70000", "2", "3", "128", "1", "1"]
    assert launch[:-2] == ["launch", "0x2000", *grid_and_block, str(100 * 1024), "0x7f00", "(nil)"]
    assert launch[-2:] == [values[0].hex(), values[1][:4].hex()]


@needs_bindings
def test_a_kernel_that_waits_may_be_launched_early(driver: Path, tmp_path: Path) -> None:
    record, printed = launched(
        driver,
        tmp_path,
        binary=given(tmp_path / "k.cubin", is_dependent=True, shared_bytes=512),
        grid=[7, 2, 3],
        stream=0x7F00,
        values=[(5).to_bytes(8, "little").hex()],
        widths=(8,),
    )
    assert not printed
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    launch = ["launch", "0x2000", "7", "2", "3", "128", "1", "1", "512", "0x7f00", "(nil)", "6=1"]
    assert record[-1] == [*launch, (5).to_bytes(8, "little").hex()]


@needs_bindings
@pytest.mark.parametrize(
    ("changes", "grid", "image", "problem"),
    [
        ({"entry": "absent"}, 1, b"\x7fELF", "could not find absent: CUDA_ERROR_NOT_FOUND"),
        ({}, 0, b"\x7fELF", r"could not launch k with grid \(0, 1, 1\): CUDA_ERROR_INVALID_VALUE"),
        ({"is_dependent": True}, 0, b"\x7fELF", r"could not launch k with grid \(0, 1, 1\): CUDA_ERROR_INVALID_VALUE"),
        ({}, 1, b"PTX!", "could not load the kernel: CUDA_ERROR_NO_BINARY_FOR_GPU.*update the GPU's driver"),
    ],
)
def test_a_driver_that_refuses_is_named(
    driver: Path, tmp_path: Path, changes: dict[str, Any], grid: int, image: bytes, problem: str
) -> None:
    fields = given(tmp_path / "k.cubin", **changes)
    (tmp_path / "k.cubin").write_bytes(image + bytes(60))
    _, printed = launched(driver, tmp_path, binary=fields, grid=[grid, 1, 1], stream=0, values=[])
    assert re.search(problem, " ".join(printed.split())), printed


@pytest.fixture(scope="module")
def lowered() -> tuple[Program, dict[str, str]]:
    """A norm with a product in tensor descriptors, for an H100."""
    b = GraphBuilder(torch.bfloat16)
    x = b.call(ops.embedding.default, b.inputs["input_ids"], b.weight("embed", 64, 128))
    normed = b.call(ops.rms_norm.default, x, b.weight("norm", 128), 1e-5)
    y = b.call(ops.gated_linear.default, normed, b.weight("w", 256, 128), None, "silu")
    h = b.call(ops.fused_linear.default, y, b.weight("down", 128, 128), None, x, "identity", 0.5)
    rows = b.call(ops.select_rows.default, h, b.inputs["logit_rows"])
    graph, _ = b.finish(b.call(ops.lm_head.default, rows, b.weight("head", 64, 128)))
    device_lowered = lower_device(graph, gpu_target("h100"), BuildOptions())
    return device_lowered.program, device_lowered.sources


WANTED = ("persistent_kernel", "norm_kernel", "gemv_kernel")


@dataclass(frozen=True)
class Compiled:
    """A kernel, its binary and its PTX; and what became of it and of it with a number of warps that cannot be."""

    kernel: DeviceKernel
    built: CompiledKernel
    ptx: str
    usable: tuple[DeviceKernel | None, ...]


@pytest.fixture(scope="module")
def compiled(
    lowered: tuple[Program, dict[str, str]], compiler: KeptCompiler, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Compiled]:
    """One kernel of each function."""
    folder = tmp_path_factory.mktemp("kernels")
    for file, text in lowered[1].items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    by_function: dict[str, Compiled] = {}
    workers = compiler.workers()
    for kernel in lowered[0].kernels:
        if kernel.function in WANTED and kernel.function not in by_function:
            built = workers.compile(kernel, gpu_target("h100"), folder)
            ptx = built.assembly.read_text(encoding="utf-8")
            tried = workers.compile_usable((kernel, replace(kernel, num_warps=3)), gpu_target("h100"), folder)
            by_function[kernel.function] = Compiled(kernel, built, ptx, tried)
    return by_function


def entry_widths(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel."""
    head = ptx[ptx.index(".entry") :]
    return [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", head[: head.index(")")])]


def test_what_is_packed_is_what_the_compiled_kernel_takes(compiled: dict[str, Compiled]) -> None:
    assert set(compiled) == set(WANTED)
    for result in compiled.values():
        binary, parameters = result.built.binary, result.kernel.parameters
        expected = [8 if p.type.startswith("*") else {"i32": 4, "i64": 8, "fp32": 4}[p.type] for p in parameters]
        assert entry_widths(result.ptx) == expected + [8] * binary.extra_pointers, result.kernel.function
        # The scratch memory is the first that Triton adds, and only descriptors need it.
        assert bool(binary.scratch_bytes) == (result.kernel.function == "persistent_kernel")
        assert binary.extra_pointers >= 1 or not binary.scratch_bytes


def test_what_does_not_compile_is_left_out_of_tuning(compiled: dict[str, Compiled]) -> None:
    for result in compiled.values():
        good, bad = result.usable
        assert good == replace(result.kernel, binaries={"sm_90": result.built.binary})
        assert bad is None


@needs_bindings
def test_a_compiled_kernel_is_launched_with_its_arguments(
    driver: Path,
    tmp_path: Path,
    lowered: tuple[Program, dict[str, str]],
    compiled: dict[str, Compiled],
) -> None:
    """From a program's launch to the bytes that the driver reads, for a kernel with descriptors in scratch memory."""
    persistent = compiled["persistent_kernel"]
    kernel, built, ptx = persistent.kernel, persistent.built, persistent.ptx
    program = replace(with_every_buffer(lowered[0]), launches=launches_of(lowered[0], kernel))
    call = plan_calls(program)[0]
    bases = {"arena": 1 << 44, "weight": 2 << 44, "output": 3 << 44, "input": 4 << 44}
    values = argument_values(call, SHAPE, lambda space, name: bases[space], extra_pointers(built.binary, SCRATCH))
    folder = built.assembly.parent.parent
    fields = asdict(built.binary) | {"file": str(folder / built.binary.file)}
    grid = call.programs(SHAPE.counts())
    record, printed = launched(
        driver,
        tmp_path,
        binary=fields,
        grid=list(grid),
        stream=0,
        values=[value.hex() for value in values],
        widths=entry_widths(ptx),
    )
    assert not printed
    launch = record[-1]
    assert launch[2:8] == [*map(str, grid), str(built.binary.threads), "1", "1"]
    got = dict(zip([p.name for p in kernel.parameters], launch[11:], strict=False))
    assert int.from_bytes(bytes.fromhex(got["weight_ptr"]), "little") == 2 << 44
    assert int.from_bytes(bytes.fromhex(got["tokens"]), "little") == SHAPE.tokens
    (first_extra, *others) = launch[11 + len(kernel.parameters) :]
    assert int.from_bytes(bytes.fromhex(first_extra), "little") == SCRATCH
    assert all(int(other, 16) == 0 for other in others)


def launches_of(program: Program, kernel: DeviceKernel) -> tuple[Launch, ...]:
    """The first that launches it, among the alternatives too."""
    every = [*program.launches, *(launch for way in program.alternatives for launch in way.launches)]
    chosen = next(launch for launch in every if launch.kernel == kernel.name)
    return (chosen,)
