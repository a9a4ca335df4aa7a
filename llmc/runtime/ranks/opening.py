"""Open engines of several ranks with this process as the first rank."""

from functools import partial

import torch

from llmc.engine_format.reader import check_target
from llmc.runtime.executors.opening_request import OpeningRequest
from llmc.runtime.ranks.device_ranks import RankedDeviceExecutor
from llmc.runtime.ranks.device_stages import StagedDeviceExecutor
from llmc.runtime.ranks.ranked_executor import RankedCppExecutor
from llmc.runtime.ranks.staged_executor import StagedCppExecutor

# Bytes of the memory that ranks' processes share for flags of lost ranks; no values go through it.
_FLAGS_BYTES = 4096


def open_on_cpus(request: OpeningRequest) -> tuple[RankedCppExecutor, int]:
    """Open a CPU engine of several ranks. Raises TargetError if this machine lacks instructions, RankError for a rank
    that does not start."""
    directory = request.directory
    check_target(directory.path, directory.manifest.target)
    blocks, _ = request.in_host_memory()
    executor = StagedCppExecutor if directory.program.layout.pipeline > 1 else RankedCppExecutor
    return executor(directory, blocks, request.threads, request.check), blocks


def open_on_gpus(request: OpeningRequest) -> tuple[RankedDeviceExecutor, int]:
    """Open the ranks on torch's devices. Raises TargetError, ToolchainError, OptionError, RankError."""
    from llmc.runtime.executors.cuda_opening import open_engine
    from llmc.runtime.ranks.gpu_place import meet_gpus

    own, blocks = open_engine(request)
    # Restarts meet on another thread, whose current device is another.
    meet = partial(meet_gpus, device=torch.cuda.current_device())
    return _ranked(request)(request.directory, own, blocks, meet, _FLAGS_BYTES), blocks


def open_interpreted(request: OpeningRequest) -> tuple[RankedDeviceExecutor, int]:
    """Open an engine in this machine's memory, with a process for each rank. Raises RankError."""
    from llmc.runtime.executors.triton_interpreter import open_engine
    from llmc.runtime.ranks.interpreted_place import meet_interpreted, shared_bytes

    own, blocks = open_engine(request)
    nbytes = shared_bytes(request.directory.program.ranks)
    return _ranked(request)(request.directory, own, blocks, meet_interpreted, nbytes), blocks


def open_executed(request: OpeningRequest) -> tuple[RankedDeviceExecutor, int]:
    """Open an engine as `open_interpreted` does, by the PTX that it keeps. Raises RankError, EngineFormatError."""
    from llmc.runtime.executors.ptx import open_engine
    from llmc.runtime.ranks.interpreted_place import meet_interpreted, shared_bytes

    own, blocks = open_engine(request)
    nbytes = shared_bytes(request.directory.program.ranks)
    return _ranked(request)(request.directory, own, blocks, meet_interpreted, nbytes, "ptx"), blocks


def _ranked(request: OpeningRequest) -> type[RankedDeviceExecutor]:
    return StagedDeviceExecutor if request.directory.program.layout.pipeline > 1 else RankedDeviceExecutor
