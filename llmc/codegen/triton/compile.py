"""Compile Triton kernels to cubin or hsaco without a GPU, in worker processes and with Triton's cache inside llmc's."""

import importlib.util
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from llmc.cache import CacheKind, open_cache
from llmc.codegen.triton.compile_process import CompileProcess
from llmc.codegen.triton.kept_kernels import find_kernel, keep_kernel, kernel_entry
from llmc.errors import LoweringError, ToolchainError
from llmc.files.scratch_directory import ScratchDirectory
from llmc.files.storage_error import ELSEWHERE_CACHED, storage_error
from llmc.processes.processors import usable_processors
from llmc.program import DeviceBinary, DeviceKernel, Program
from llmc.targets import GpuTarget


def require_triton() -> None:
    """Raise ToolchainError if Triton is not installed, or has no assembler for NVIDIA's GPUs."""
    spec = importlib.util.find_spec("triton")
    if spec is None:
        raise ToolchainError(
            "Triton is not installed; GPU engines are built with it, on a machine with or without a GPU",
            at="import triton",
            fix="install it: pip install 'llmc-compiler[gpu]'",
        )
    from triton import knobs

    try:
        knobs.nvidia.ptxas, knobs.nvidia.cuobjdump  # noqa: B018  Attributes are looked up at their first use.
    except RuntimeError as error:
        raise ToolchainError(
            f"Triton has no assembler for NVIDIA's GPUs: {error}",
            at=spec.origin,
            fix="install Triton again: pip install --force-reinstall --no-deps triton",
        ) from None


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's binary, and the file of its assembly (PTX or AMD)."""

    binary: DeviceBinary
    assembly: Path


def compile_program(
    program: Program,
    directory: Path,
    target: GpuTarget,
    progress: Callable[[int], None] | None = None,
    folder: str = "kernels",
    workers: "Workers | None" = None,
) -> Program:
    """Compile the kernels that a program's steps launch, and return the program with the binaries' file names.

    Binaries are written to the folder, for NVIDIA's GPUs with their PTX. Library kernels stay as they are. directory:
    the engine's; kernels' sources and the folder are relative to it. progress: called with 1 for each compiled kernel.
    workers: running workers, if any. Raises LoweringError for a kernel that does not compile or does not fit the
    target's shared memory.
    """
    kernels = program.launched_kernels()
    if not kernels:
        return program
    by_name: dict[str, DeviceKernel] = {}
    count = min(len(kernels), usable_processors())
    opened: AbstractContextManager[Workers] = nullcontext(workers) if workers else Workers(count)
    with opened as ready:
        (directory / folder).mkdir(parents=True, exist_ok=True)
        for kernel, compiled in zip(kernels, ready.compile_all(kernels, target, directory, folder), strict=True):
            compiled.assembly.unlink()
            by_name[kernel.name] = replace(kernel, binaries={target.arch_name: compiled.binary})
            if progress is not None:
                progress(1)
    return replace(program, kernels=tuple(by_name.get(kernel.name, kernel) for kernel in program.kernels))


class Workers:
    """At most `count` processes that compile kernels, for those that are not kept from before; each starts with
    importing torch and Triton, so keep them for many kernels."""

    def __init__(self, count: int) -> None:
        self._cache = open_cache(CacheKind.TRITON)
        self._processes: list[CompileProcess] = []
        # Triton and the assembler write temporary files here, because killed processes leave theirs behind.
        self._scratch = ScratchDirectory(self._cache.path, ".workers")
        self._idle: SimpleQueue[CompileProcess | None] = SimpleQueue()
        for _ in range(count):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(count)

    def start(self) -> None:
        """Start all processes now, while there is something else to do before the first kernel."""
        for _ in range(self._idle.qsize()):
            self._idle.put(self._idle.get() or self._started())

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.end(at_once=kind is not None)
        self._scratch.cleanup()
        if self._processes:
            self._cache.tidy()

    def compile_all(
        self, kernels: Sequence[DeviceKernel], target: GpuTarget, directory: Path, folder: str = "kernels"
    ) -> Any:
        """An iterator over the kernels' CompiledKernels, in order. Raises as `compile_program` does."""
        return self._threads.map(lambda kernel: self.compile(kernel, target, directory, folder), kernels)

    def compile_usable(
        self, kernels: Sequence[DeviceKernel], target: GpuTarget, directory: Path, folder: str = "kernels"
    ) -> tuple[DeviceKernel | None, ...]:
        """Return each kernel with its binary; None for one that does not compile, does not fit or spills."""
        return tuple(self._threads.map(lambda kernel: self._usable(kernel, target, directory, folder), kernels))

    def _usable(self, kernel: DeviceKernel, target: GpuTarget, directory: Path, folder: str) -> DeviceKernel | None:
        try:
            binary = self.compile(kernel, target, directory, folder).binary
        except LoweringError:
            return None
        return None if binary.spill_bytes else replace(kernel, binaries={target.arch_name: binary})

    def compile(
        self, kernel: DeviceKernel, target: GpuTarget, directory: Path, folder: str = "kernels"
    ) -> CompiledKernel:
        stem = f"{folder}/{kernel.name}.{target.arch_name}"
        output = str(directory / stem)
        request = {
            "source": str(directory / kernel.source),
            "function": kernel.function,
            "signature": {parameter.name: parameter.type for parameter in kernel.parameters},
            "constants": kernel.constants,
            "divisible": [parameter.name for parameter in kernel.parameters if parameter.divisible],
            "num_warps": kernel.num_warps,
            "num_stages": kernel.num_stages,
            "backend": target.backend,
            "arch": target.arch,
            "warp_size": target.warp_size,
            "output": output,
        }
        entry = kernel_entry(request)
        answer = find_kernel(entry, output)
        if answer is None:
            answer = self._ask(request)
            if "error" not in answer:
                keep_kernel(entry, answer, Path(f"{output}.{target.binary_kind}"))
        where = f"{kernel.source}: {kernel.function}({_constants_text(kernel)})"
        if answer.get("no_room") is not None:
            full = OSError(answer["no_room"], os.strerror(answer["no_room"]))
            raise storage_error(full, self._cache.path, content="compiled kernels", elsewhere=ELSEWHERE_CACHED)
        if "error" in answer:
            raise LoweringError(
                f"kernel {kernel.name} does not compile for {target.arch_name}: {answer['error']}",
                at=where,
                fix="this is a bug in the kernel or in this version of triton: report it with the model's name",
            )
        assembly = Path(answer.pop("assembly"))
        kept = _kept_ptx(stem, assembly, directory) if target.backend == "cuda" else None
        binary = DeviceBinary(file=f"{stem}.{target.binary_kind}", assembly=kept, **answer)
        if binary.shared_bytes > target.shared_memory_per_block:
            raise LoweringError(
                f"kernel {kernel.name} needs {binary.shared_bytes} bytes of shared memory a block; {target.name} has "
                f"{target.shared_memory_per_block}",
                at=where,
                fix="report it with the model's name, or build for a target with more",
            )
        return CompiledKernel(binary, assembly)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._idle.get()
        try:
            process = process or self._started()
            return process.ask(request)
        finally:
            self._idle.put(process)

    def _started(self) -> CompileProcess:
        if not self._processes:
            self._cache.check_all()
        process = CompileProcess(self._cache.path, self._scratch.path)
        self._processes.append(process)
        return process


def _kept_ptx(stem: str, assembly: Path, directory: Path) -> str:
    """Write PTX, compressed, next to its binary and return the file's name. The gzip header has no time or name."""
    name = f"{stem}.ptx.gz"
    (directory / name).write_bytes(zlib.compress(assembly.read_bytes(), 9, wbits=31))
    return name


def _constants_text(kernel: DeviceKernel) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in kernel.constants.items())
