"""Engines without weights: built anywhere in a minute, a few megabytes, with numbers drawn when a GPU opens them.

Speed does not depend on the values of weights. A real checkpoint of 8B parameters is 16 GB to write, read and build
from, which takes longer than all that is measured with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.random_checkpoint import SHAPES, layer_tensors, outer_tensors
from llmc.codegen.stage_builds import StageBuild
from llmc.compiler import build
from llmc.engine_format import EngineDirectory
from llmc.engine_format.manifest import FileRecord
from llmc.engine_format.weight_file import header, plan_shards
from llmc.engine_format.writer import EngineWriter
from llmc.graph.dtype_names import TORCH_DTYPES
from llmc.program import WeightSlot
from llmc.runtime.device.binaries import binaries_for
from llmc.runtime.device.device import open_device
from llmc.runtime.device.memory import plan_device_memory
from llmc.runtime.device.weights import Allocate
from llmc.runtime.executors.cuda import CudaExecutor
from llmc.runtime.executors.cuda_opening import prompts_of

_CHUNK_BYTES = 64 << 20


def write_hollow_checkpoint(shape: str, directory: Path) -> Path:
    """A checkpoint whose numbers are a hole in its file: zeros that take no room on the disk."""
    directory.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    with mock.patch("benchmarks.random_checkpoint.matrix", lambda rows, columns, _: _absent(rows, columns)):
        unused: Any = None
        tensors = outer_tensors(config, unused)
        for layer in range(config["num_hidden_layers"]):
            tensors |= layer_tensors(config, layer, unused)
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.itemsize
        entries[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(entries).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def build_weightless(model: Path, engine: Path, **options: Any) -> None:
    """An engine whose weight files are headers and holes. options: of llmc.build."""

    def write_holes(build: StageBuild, shared: Collection[str], *rest: Any) -> None:
        writer = next(each for each in rest if isinstance(each, EngineWriter))
        for number, slots in enumerate(plan_shards([s for s in build.program.weights if s.name not in shared])):
            head, gaps = header(slots)
            size = len(head) + sum(gaps) + sum(slot.nbytes for slot in slots)
            name = f"weights/rank0-{number:04d}.safetensors"
            with writer._new_path(name).open("wb") as file:
                file.write(head)
                file.truncate(size)
            count = -(-size // _CHUNK_BYTES)
            writer._files[name] = FileRecord(size, ("0" * 64,) * count, ("0" * 16,) * count)

    # Of a build only this step reads the checkpoint's numbers.
    with mock.patch("llmc.compiler._write_weights", write_holes):
        build(str(model), engine, **options)


def open_weightless(engine: EngineDirectory) -> tuple[CudaExecutor, int]:
    """The executor, with weights that are drawn on the device, and the number of blocks of its cache."""
    device = open_device(engine.path)
    binaries = binaries_for(engine, device, lambda line: print(line, file=sys.stderr))
    free, _ = torch.cuda.mem_get_info(device.index)
    memory = plan_device_memory(binaries.program, free, None)
    prompts = prompts_of(binaries.program, device)
    return CudaExecutor(engine, device, binaries, memory, drawn_weights, prompts), memory.blocks


def drawn_weights(engine: EngineDirectory, allocate: Allocate) -> dict[str, tuple[torch.Tensor, int]]:
    """Each weight's memory, filled, and 0 for where the weight begins in it."""
    found = {slot.name: (allocate(slot.nbytes, slot.name), 0) for slot in engine.program.weights}
    for slot in engine.program.weights:
        draw(slot, found[slot.name][0])
    return found


def draw(slot: WeightSlot, memory: torch.Tensor) -> None:
    """Numbers that keep activations finite and of order one, into the slot's bytes."""
    dtype = TORCH_DTYPES[slot.dtype]
    if not dtype.is_floating_point:
        memory.random_(0, 96)  # No NaN as fp8.
        return
    numbers = memory.view(dtype)
    if len(slot.shape) == 1:
        numbers.uniform_(0.8, 1.2)
    elif slot.name.endswith("_scales"):
        numbers.uniform_(1e-3, 3e-3)
    else:
        numbers.uniform_(-1, 1).mul_((3 / slot.shape[-1]) ** 0.5)


def _absent(rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
