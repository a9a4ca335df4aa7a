"""The pools of adapters of an engine for GPUs, as tensors in device memory, and steps with an adapter per token."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.program import ADAPTERS, AdapterPools, Program
from llmc.runtime.adapters.placed_adapter import Elements, PlacedAdapter
from llmc.runtime.loop.step import Step


def adapter_tensors(program: Program, allocate: Callable[[str, int], Tensor]) -> "AdapterTensors | None":
    """The pools of an engine, or None for one that takes no adapters."""
    return None if program.adapters is None else AdapterTensors(program.adapters, allocate)


class AdapterTensors:
    """The pools of adapters as tensors. allocate: returns zeroed memory of a size in bytes for a pool's name, on any
    device."""

    def __init__(self, pools: AdapterPools, allocate: Callable[[str, int], Tensor]) -> None:
        dtypes = pools.dtypes()
        memory = {name: allocate(name, nbytes) for name, nbytes in pools.nbytes().items()}
        self._pools = [
            tuple(memory[name].view(TORCH_DTYPES[dtypes[name]]).view(shape) for name, shape in pools.shapes(i).items())
            for i in range(len(pools.products))
        ]

    def put(self, slot: int, adapter: PlacedAdapter) -> None:
        """Write an adapter into a slot, replacing its contents; queued before the next step."""
        adapter.put(self._pools, slot, _tensor)


def with_adapters(step: Step) -> Step:
    """A step of an engine that takes adapters: products read which one each token has, also where none has one.
    Launches for adapters are those of the side ADAPTERS."""
    if step.adapter_of_token is not None:
        return replace(step, sides=(*step.sides, ADAPTERS))
    tokens, rows = np.zeros(len(step.input_ids), np.int32), np.zeros(len(step.logit_rows), np.int32)
    return replace(step, adapter_of_token=tokens, adapter_of_logit_row=rows)


def _tensor(values: Elements) -> Tensor:
    stored = torch.from_numpy(values)
    return stored.view(torch.bfloat16) if values.dtype == np.uint16 else stored
