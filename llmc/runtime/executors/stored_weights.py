"""An engine's weights as its graph reads them, from the layouts in which they are stored."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from llmc.engine_format import EngineDirectory
from llmc.engine_format.weight_file import StoredTensor
from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD
from llmc.formats.code_format import CODE_FORMATS, STEP_PARTS
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.graph.serialize import WeightOf
from llmc.program import Layout, WeightSlot


def graph_weights(engine: EngineDirectory, table: Mapping[str, WeightOf]) -> dict[str, Tensor]:
    """Return the weights by placeholder. table: from read_weight_table; without one, weights are stored under their own
    names."""
    stored = {slot.name: (slot, tensor) for slot, tensor in zip(engine.program.weights, engine.tensors, strict=True)}
    wanted = table or {name: WeightOf(name, slot.dtype) for name, (slot, _) in stored.items()}
    weights: dict[str, Tensor] = {}
    for name, weight in wanted.items():
        if weight.slot not in stored or weight.dtype not in TORCH_DTYPES or not _is_read(weight):
            raise EngineFormatError(
                f"the graph's weight {name} is {weight.slot!r} in {weight.dtype}, which the engine does not hold",
                at=engine.path,
                fix=REBUILD,
            )
        slot, tensor = stored[weight.slot]
        weights[name] = in_graph(stored_tensor(engine, tensor), slot, weight)
    return weights


def in_graph(data: Tensor, slot: WeightSlot, weight: WeightOf) -> Tensor:
    """A placeholder's tensor, from the contents of its slot."""
    return blocked_in_rows(data, slot, weight) if weight.format else in_rows(data, slot, TORCH_DTYPES[weight.dtype])


def _is_read(weight: WeightOf) -> bool:
    """Whether its record, if there is one, has that part."""
    format = CODE_FORMATS.get(weight.format)
    if format is None:
        return not weight.format
    return weight.part == "codes" or (weight.part in STEP_PARTS and format.steps is not None)


def stored_tensor(engine: EngineDirectory, stored: StoredTensor) -> Tensor:
    """Return a copy of a tensor as its file has it, because torch has no read-only tensors."""
    data = torch.from_numpy(np.array(engine.weight_file(stored)[stored.begin : stored.end]))
    return data.view(TORCH_DTYPES[stored.dtype]).view(stored.shape)


def in_rows(data: Tensor, slot: WeightSlot, dtype: torch.dtype) -> Tensor:
    """The rows of a weight that codegen/cpp/pack.py (ROWS, VECTOR_F32), codegen/triton/code_rows.py or mask_rows.py
    packed."""
    if slot.layout is Layout.CODE_ROWS:
        return _codes(data.view(dtype).view(slot.shape[0], -1), slot)
    if slot.layout.code_bits is not None:
        unsigned = _unsigned(data, slot, slot.layout.code_bits)
        return unsigned if dtype is torch.uint8 else unsigned.view(torch.int8) - (1 << (slot.layout.code_bits - 1))
    if slot.layout is Layout.MASK_ROWS:
        return data.view(torch.int64).view(slot.shape)
    if slot.layout in (Layout.ROWS, Layout.VECTOR_F32):
        return data.view(slot.shape).to(dtype)
    raise EngineFormatError(
        f"weight {slot.name} is stored as {slot.layout.value}, which only CPU kernels read",
        fix="run the engine on the CPU that it was built for",
    )


def blocked_in_rows(data: Tensor, slot: WeightSlot, weight: WeightOf) -> Tensor:
    """Codes or steps of a blocked format, from rows of codegen/triton/code_rows.py."""
    record = CODE_FORMATS[weight.format]
    if slot.layout is not Layout.STEP_ROWS:
        unsigned = _unsigned(data, slot, record.bits)
        return unsigned if record.integers is None else unsigned.view(torch.int8) - record.unsigned_shift
    assert record.steps is not None, f"{weight.format} has no steps"
    bits = (data.view(slot.shape[0], -1, 1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)
    fields = bits[:, : slot.shape[1] * record.step_field_bits].unflatten(
        -1, (-1, 1 + record.has_minimum, record.steps.bits)
    )
    digits = fields.int() << torch.arange(record.steps.bits)
    steps: Tensor = digits.sum(-1)[..., STEP_PARTS.index(weight.part)]
    return (steps + (record.steps.least if weight.part == "scale_steps" else 0)).to(torch.int8)


def _unsigned(data: Tensor, slot: WeightSlot, bits: int) -> Tensor:
    """uint8 codes from planes."""
    rows, runs, low = data.view(torch.uint8).view(slot.shape[0], -1), -(-slot.shape[1] // 32), 4 if bits >= 4 else 2
    numbers = _plane(rows[:, : 4 * low * runs], runs, low)
    if bits > low:
        numbers = numbers | _plane(rows[:, 4 * low * runs : 4 * bits * runs], runs, bits - low) << low
    return _codes(numbers.flatten(1), slot)


def _plane(rows: Tensor, runs: int, bits: int) -> Tensor:
    """[out, runs, 2, 16]: `bits` bits of the codes of each 32 channels."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(2, -1, 1)
    fields: Tensor = rows.unflatten(1, (runs, 1, 1, -1)) >> shifts & ((1 << bits) - 1)
    return fields.flatten(3)


def _codes(padded: Tensor, slot: WeightSlot) -> Tensor:
    return padded[:, : slot.shape[1]].contiguous()
