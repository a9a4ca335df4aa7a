"""Write a GGUF file of random codes, tensor by tensor; runs in the environment of llama.cpp, which reads it.

mixture_gguf.py and states_gguf.py say what is in it. Every matrix is Q4_0 but those that llama-quantize leaves in F32:
routers, and what belongs to a scan. Codes are drawn, and not rounded from numbers: speed does not depend on them, and
tensors are written one at a time. There is no vocabulary: benchmarks use token ids.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

BLOCK, CODE_BYTES = 32, 16
# Of codes from -8 to 7 that are equally likely.
CODE_SPREAD = 4.61
NUMBERS = ("ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """What llama.cpp calls it, and of a config.json what it wants to know and which tensors it reads, in order."""

    name: str
    add_metadata: Callable[[gguf.GGUFWriter, dict[str, Any]], None]
    tensor_shapes: Callable[[dict[str, Any]], Shapes]


def command(description: str | None, families: dict[str, Family]) -> None:
    """A script's: a config.json of transformers', and where the file goes. families: by the config's model_type."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    family = families[config["model_type"]]
    writer = gguf.GGUFWriter(arguments.output, family.name)
    writer.add_tokenizer_model("no_vocab")
    family.add_metadata(writer, config)
    write_tensors(writer, family.tensor_shapes(config))


def write_tensors(writer: gguf.GGUFWriter, shapes: Shapes, seed: int = 0) -> None:
    """All of the file that follows the metadata."""
    for name, shape in shapes.items():
        is_coded = is_matrix(name, shape)
        stored = (*shape[:-1], shape[-1] // BLOCK * (2 + CODE_BYTES)) if is_coded else shape
        dtype = np.dtype(np.uint8 if is_coded else np.float32)
        kind = gguf.GGMLQuantizationType.Q4_0 if is_coded else None
        writer.add_tensor_info(name, stored, dtype, math.prod(stored) * dtype.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(seed)
    for name, shape in shapes.items():
        made = blocks(shape, generator) if is_matrix(name, shape) else numbers(name, shape, generator)
        writer.write_tensor_data(made)
    writer.close()


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is in blocks of codes. Routers, and what belongs to a scan, are numbers."""
    return len(shape) > 1 and not any(part in NUMBERS for part in name.split("."))


def blocks(shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Of Q4_0: a scale in fp16 before the codes of 32 columns, of the size that keeps activations near one."""
    count = math.prod(shape) // BLOCK
    found = np.empty((count, 2 + CODE_BYTES), np.uint8)
    found[:, :2] = np.frombuffer(np.float16(shape[-1] ** -0.5 / CODE_SPREAD).tobytes(), np.uint8)
    found[:, 2:] = np.frombuffer(generator.bytes(count * CODE_BYTES), np.uint8).reshape(count, CODE_BYTES)
    return found.reshape(*shape[:-1], -1)


def numbers(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.float32]:
    """Ones of a norm, how fast each head forgets, or the rows of a router or a convolution."""
    if name.endswith("ssm_a"):
        return -np.arange(1, 1 + shape[0], dtype=np.float32).reshape(shape)
    if len(shape) == 1 or 1 in shape or "norm" in name:
        return np.ones(shape, np.float32)
    found: npt.NDArray[np.float32] = (generator.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
    return found
