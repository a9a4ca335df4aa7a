"""A CudaExecutor without a GPU: its memory is the CPU's, launches are recorded, and graphs replay what they captured.

torch.cuda's part in the executor is replaced by a stand-in. Copies run at once, or are kept by a graph in capture. A
driver that is held runs graphs only when somebody waits for an event or for the stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmc.program import DeviceBinary, DeviceKernel, Program
from llmc.runtime.device.binaries import DeviceBinaries
from llmc.runtime.device.device import Device
from llmc.runtime.device.memory import memory_of_blocks
from llmc.runtime.device.prompt_inputs import PromptSizes
from llmc.runtime.executors import cuda, cuda_caches
from llmc.runtime.executors.cuda_driver import LoadedKernel
from tests.runtime.device.device_program import binary

STREAM = 0x7F00
ARCH = "sm_90"


@dataclass(frozen=True)
class Recorded:
    """A launch as the driver sees it. file: of its binary. values: eight bytes for each parameter."""

    file: str
    grid: tuple[int, int, int]
    stream: int
    values: tuple[bytes, ...]


@dataclass
class FakeDriver:
    """Stands in for cuda.bindings.driver. counts: parameters of each binary, by file. events: launches in order.
    is_held: whether graphs wait until somebody waits for them. replays: of graphs. waits: how many replays there were
    when somebody waited, and how many of them were waited for."""

    counts: dict[str, int]
    events: list[Recorded] = field(default_factory=list)
    # In a capture, what it keeps.
    kept: list[Callable[[], Any]] | None = None
    is_held: bool = False
    replays: int = 0
    waits: list[tuple[int, int]] = field(default_factory=list)
    _held: list[Callable[[], Any]] = field(default_factory=list)

    def cuLaunchKernel(self, function: DeviceBinary, *given: Any) -> tuple[int]:
        x, y, z, _, _, _, _, stream, arguments, _ = given
        return self._launch(function, (x, y, z), stream, arguments)

    def cuLaunchKernelEx(self, configuration: Any, function: DeviceBinary, arguments: int, _: int) -> tuple[int]:
        made = configuration
        return self._launch(function, (made.gridDimX, made.gridDimY, made.gridDimZ), made.hStream, arguments)

    CUlaunchConfig = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace())

    def _launch(self, function: DeviceBinary, grid: tuple[int, int, int], stream: int, arguments: int) -> tuple[int]:
        count = self.counts[function.file]
        pointers = (ctypes.c_uint64 * count).from_address(arguments)
        values = tuple(ctypes.string_at(pointer, 8) for pointer in pointers)
        launch = Recorded(function.file, grid, int(stream), values)
        self.do(lambda: self.events.append(launch))
        return (0,)

    def do(self, work: Callable[[], Any]) -> Any:
        """Now, or when the graph in capture is replayed."""
        if self.kept is None:
            return work()
        self.kept.append(work)
        return None

    def replay(self, work: Callable[[], Any]) -> None:
        """Run a graph's work, after the graphs before it."""
        self.replays += 1
        self._held.append(work)
        if not self.is_held:
            self.run_to(self.replays)

    def wait(self, replays: int) -> None:
        """The host waits for the first graphs, up to this number."""
        self.waits.append((self.replays, replays))
        self.run_to(replays)

    def run_to(self, replays: int) -> None:
        """Run held graphs until this number of graphs has run in total."""
        while self.replays - len(self._held) < replays:
            self._held.pop(0)()

    def load(self, binary: DeviceBinary, directory: Path) -> LoadedKernel:
        """In place of load_kernel."""
        return LoadedKernel(self, None, binary, binary)

    def taken(self) -> list[Recorded]:
        """The launches since the last call."""
        events, self.events = self.events, []
        return events


class _Capture(TorchDispatchMode):
    """Keeps operations that write for the replay; views are made at once."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._driver = driver

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        self._driver.do(lambda: func(*args, **(kwargs or {})))
        return kwargs["out"] if kwargs and "out" in kwargs else args[0]


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self, driver: FakeDriver) -> None:
        self.work: list[Callable[[], Any]] = []
        self._driver = driver

    def replay(self) -> None:
        self._driver.replay(lambda: [call() for call in self.work])


class FakeEvent:
    """Stands in for torch.cuda.Event."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver, self._replays = driver, 0

    def record(self, stream: Any = None) -> None:
        self._replays = self._driver.replays

    def synchronize(self) -> None:
        self._driver.wait(self._replays)

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class _FakeTorch:
    """The module torch for the executor, on the CPU."""

    def __init__(self, driver: FakeDriver) -> None:
        stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: driver.run_to(driver.replays))

        @contextmanager
        def guard(device: Any) -> Iterator[None]:
            yield

        @contextmanager
        def capture(graph: FakeGraph, **options: Any) -> Iterator[None]:
            driver.kept = graph.work
            try:
                with _Capture(driver):
                    yield
            finally:
                driver.kept = None

        self.cuda = SimpleNamespace(
            CUDAGraph=lambda: FakeGraph(driver),
            Stream=lambda device=None: stream,
            Event=lambda **options: FakeEvent(driver),
            current_stream=lambda device=None: stream,
            device=guard,
            empty_cache=lambda: None,
            graph=capture,
            graph_pool_handle=lambda: (0, 0),
            mem_get_info=lambda device=None: (1 << 36, 1 << 37),
            synchronize=lambda device=None: None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: str, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def empty(self, *shape: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return torch.empty(*shape, **options)


def with_binaries(program: Program) -> Program:
    """Every kernel has a binary of its own for sm_90, in a file of its name; every third needs scratch memory,
    and every other may start while the launch before it runs."""

    def made_up(index: int, kernel: DeviceKernel) -> DeviceKernel:
        scratch = 0 if index % 3 else 100 + index
        own = replace(binary(ARCH, extra_pointers=2, scratch_bytes=scratch), file=kernel.name)
        return replace(
            kernel, binaries={ARCH: replace(own, scratch_alignment=128 << index % 2, is_dependent=index % 2 == 1)}
        )

    kernels = (k if k.is_library else made_up(index, k) for index, k in enumerate(program.kernels))
    return replace(program, kernels=tuple(kernels))


def fake_executor(
    program: Program,
    blocks: int,
    monkeypatch: pytest.MonkeyPatch,
    snapshots: int = 0,
    prompts: PromptSizes | None = None,
) -> tuple[cuda.CudaExecutor, FakeDriver]:
    """An executor of a program of with_binaries; its weights are not filled."""
    launched = [kernel for kernel in program.kernels if kernel.binaries]
    counts = {k.binaries[ARCH].file: len(k.parameters) + k.binaries[ARCH].extra_pointers for k in launched}
    driver = FakeDriver(counts)

    def weights(engine: Any, allocate: Callable[[int, str], torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
        return {slot.name: (allocate(slot.nbytes, slot.name), 0) for slot in program.weights}

    fake_torch = _FakeTorch(driver)
    monkeypatch.setattr(cuda, "torch", fake_torch)
    monkeypatch.setattr(cuda_caches, "torch", fake_torch)
    monkeypatch.setattr(cuda, "load_kernel", driver.load)
    monkeypatch.setattr(cuda, "device_weights", weights)
    memory = memory_of_blocks(program, blocks, snapshots)
    engine: Any = None
    binaries = DeviceBinaries(program, ARCH, Path())
    device = Device(0, "fake", (9, 0), 0)
    return cuda.CudaExecutor(engine, device, binaries, memory, prompts=prompts), driver
