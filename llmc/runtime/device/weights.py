"""Copy an engine's weights to a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from llmc.engine_format import EngineDirectory
from llmc.engine_format.weight_file import StoredTensor, runs_of_tensors

# Memory of a size in bytes on torch's current device, for a purpose in words.
Allocate = Callable[[int, str], Tensor]
# Each weight by name: the memory that it is in, and at which byte of it.
DeviceWeights = Callable[[EngineDirectory, Allocate], dict[str, tuple[Tensor, int]]]
_STAGING_BYTES = 64 << 20


def device_weights(engine: EngineDirectory, allocate: Allocate) -> dict[str, tuple[Tensor, int]]:
    """Return for each weight, by name, the memory that it is in, and its offset in bytes.

    Each run of tensors
    is copied through two pinned buffers: one fills from the mapped file while the other is copied.
    """
    staging = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in staging]
    bases: dict[StoredTensor, tuple[int, Tensor]] = {}
    turn = 0
    for held in runs_of_tensors(engine.tensors):
        source = engine.weight_file(held[0])
        begin, end = held[0].begin, max(stored.end for stored in held)
        target = allocate(end - begin, f"the weights in {held[0].path.name}")
        bases |= dict.fromkeys(held, (begin, target))
        for start in range(begin, end, _STAGING_BYTES):
            stop = min(start + _STAGING_BYTES, end)
            copied[turn].synchronize()
            staging[turn].numpy()[: stop - start] = source[start:stop]
            target[start - begin : stop - begin].copy_(staging[turn][: stop - start], non_blocking=True)
            copied[turn].record()
            turn = 1 - turn
    torch.cuda.current_stream().synchronize()
    placed = {}
    for slot, stored in zip(engine.program.weights, engine.tensors, strict=True):
        begin, memory = bases[stored]
        placed[slot.name] = memory, stored.begin - begin
    return placed
