"""Find the GPU that runs an engine, or say why there is none and what to run instead."""

from dataclasses import dataclass
from pathlib import Path

from llmc.errors import TargetError


@dataclass(frozen=True)
class Device:
    """A CUDA device. index: as torch numbers it. shared_memory: bytes that a block may ask for."""

    index: int
    name: str
    capability: tuple[int, int]
    shared_memory: int


def open_device(engine: Path) -> Device:
    """torch's current CUDA device, initialized. cuBLAS then adds no parts of a product in 16 bits, in the whole
    process. Raises TargetError if no device can be used."""
    import torch

    if torch.version.hip is not None:
        raise no_device(engine, "this torch is built for AMD GPUs, which llmc compiles for but does not run on yet")
    if torch.version.cuda is None:
        raise no_device(engine, f"this torch ({torch.__version__}) is built without CUDA")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise no_device(engine, str(error)) from None
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    shared: int = getattr(properties, "shared_memory_per_block_optin", 0)
    return Device(index, properties.name, torch.cuda.get_device_capability(index), shared)


def no_device(engine: Path, reason: str) -> TargetError:
    """The error for a missing device: the reason in one line, and its fix."""
    reason = " ".join(reason.split())
    if "too old" in reason:
        fix = "update the NVIDIA driver, or install a torch for the CUDA version that this driver has"
        return TargetError(f"the engine needs a newer GPU driver: {reason}", at=engine, fix=fix)
    if "without CUDA" in reason:
        where = f"on a machine with an NVIDIA GPU and a torch with CUDA: llmc run {engine.name} --prompt TEXT"
    else:
        where = f"run it on a machine with an NVIDIA GPU: llmc run {engine.name} --prompt TEXT"
    return TargetError(
        f"the engine was built for a GPU, and there is none to run it on: {reason}",
        at=engine,
        fix=f"{where}; or build for this machine: llmc build MODEL --target cpu -o ENGINE",
    )
