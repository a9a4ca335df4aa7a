"""An engine's weights as its graph reads them, from the layouts in which they are stored."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from llmc.engine_format import EngineDirectory
from llmc.engine_format.weight_file import StoredTensor
from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.graph.serialize import WeightOf
from llmc.program import Layout, WeightSlot


def graph_weights(engine: EngineDirectory, table: Mapping[str, WeightOf]) -> dict[str, Tensor]:
    """By placeholder. table: as read_weight_table gives it; without one, weights are stored under their own names."""
    stored = {slot.name: (slot, tensor) for slot, tensor in zip(engine.program.weights, engine.tensors, strict=True)}
    wanted = table or {name: WeightOf(name, slot.dtype) for name, (slot, _) in stored.items()}
    weights: dict[str, Tensor] = {}
    for name, weight in wanted.items():
        if weight.slot not in stored or weight.dtype not in TORCH_DTYPES:
            raise EngineFormatError(
                f"the graph's weight {name} is {weight.slot!r} in {weight.dtype}, which the engine does not hold",
                at=engine.path,
                fix=REBUILD,
            )
        slot, tensor = stored[weight.slot]
        weights[name] = in_rows(stored_tensor(engine, tensor), slot, TORCH_DTYPES[weight.dtype])
    return weights


def stored_tensor(engine: EngineDirectory, stored: StoredTensor) -> Tensor:
    """As it is in its file: a copy, because torch has no read-only tensors."""
    data = torch.from_numpy(np.array(engine.weight_file(stored)[stored.begin : stored.end]))
    return data.view(TORCH_DTYPES[stored.dtype]).view(stored.shape)


def in_rows(data: Tensor, slot: WeightSlot, dtype: torch.dtype) -> Tensor:
    """The rows of a weight that codegen/cpp/pack.py (ROWS, VECTOR_F32), codegen/triton/code_rows.py or mask_rows.py
    packed."""
    if slot.layout is Layout.CODE_ROWS:
        return _codes(data.view(dtype).view(slot.shape[0], -1), slot)
    bits = slot.layout.code_bits
    if bits is not None:
        rows, runs = data.view(torch.uint8).view(slot.shape[0], -1), -(-slot.shape[1] // 32)
        pairs = rows[:, : 16 * runs].unflatten(1, (runs, 1, 16))
        numbers = torch.cat((pairs & 15, pairs >> 4), dim=2)
        if bits > 4:
            above = rows[:, 16 * runs :][:, : 4 * (bits - 4) * runs].unflatten(1, (runs, 1, 1, -1))
            shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8).view(2, -1, 1)
            numbers = numbers | ((above >> shifts & ((1 << (bits - 4)) - 1)) << 4).flatten(3)
        unsigned = _codes(numbers.flatten(1), slot)
        return unsigned if dtype is torch.uint8 else unsigned.view(torch.int8) - (1 << (bits - 1))
    if slot.layout is Layout.MASK_ROWS:
        return data.view(torch.int64).view(slot.shape)
    if slot.layout in (Layout.ROWS, Layout.VECTOR_F32):
        return data.view(slot.shape).to(dtype)
    raise EngineFormatError(
        f"weight {slot.name} is stored as {slot.layout.value}, which kernels for a CPU alone read",
        fix="run the engine on the CPU that it was built for",
    )


def _codes(padded: Tensor, slot: WeightSlot) -> Tensor:
    return padded[:, : slot.shape[1]].contiguous()
