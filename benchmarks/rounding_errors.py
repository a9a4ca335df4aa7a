"""The error of rounding a model's weights to blocked formats, next to plain rounding and to llama.cpp's quantizer.

    python -m benchmarks.rounding_errors --ggml SITE_PACKAGES/llama_cpp/lib/libggml-base.so --json rounding-errors.json

Prints root mean square error over root mean square, to the nearest codes and without calibration text. The weights
are the feed-forward matrices of MiniLM's third layer, which the package index holds in fp32. The library is the one
that the package llama-cpp-python installs.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.llama_1b import machine
from benchmarks.real_model_files import MODELS, fetched
from benchmarks.table_record import record_table
from llmc.formats.code_format import CODE_FORMATS
from llmc.formats.scheme_text import parse_scheme
from llmc.formats.schemes import Scheme
from llmc.frontends.gguf.block_types import BLOCK_TYPES, BlockType
from llmc.passes.quantization.round_weight import round_to_nearest

WEIGHTS = ("encoder.layer.2.intermediate.dense.weight", "encoder.layer.2.output.dense.weight")
PLAIN = ("int4", "int4:g32", "int4:g32:asym", "int5:g32", "int5:g32:asym", "int6:g32")


def main() -> None:
    """One table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", type=Path, help="libggml-base.so of llama.cpp")
    parser.add_argument("--cache", type=Path, default=Path("examples/out/real-models"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for line in _errors(list(_weights(fetched(MODELS["minilm"], given.cache))), given.ggml):
        print(line, flush=True)
        lines.append(line)
    if given.json is not None:
        record_table(given.json, {"machine": machine(torch.get_num_threads()), "model": "minilm"}, lines)


def _errors(weights: list[Tensor], ggml: Path | None) -> Iterator[str]:
    yield "| scheme | bits per weight | error | llama.cpp's error |"
    yield "|---|--:|--:|--:|"
    blocked = {kind.codes: kind for kind in BLOCK_TYPES.values() if kind.codes and CODE_FORMATS[kind.codes].is_blocked}
    for name in (*PLAIN, *blocked):
        scheme = parse_scheme(name)
        assert scheme is not None
        ours, theirs = _error(weights, partial(_rounded, scheme)), ""
        if ggml is not None and name in blocked:
            theirs = _error(weights, partial(_by_ggml, ggml, blocked[name]))
        yield f"| `{name}` | {scheme.bits(1536):.3f} | {ours} | {theirs} |"


def _weights(directory: Path) -> Iterator[Tensor]:
    """The feed-forward matrices, transposed where super-blocks of 256 columns do not divide their rows."""
    with safe_open(next(directory.rglob("model.safetensors")), "pt") as file:
        for name in WEIGHTS:
            weight = file.get_tensor(name).float()
            yield (weight if weight.shape[1] % 256 == 0 else weight.t()).contiguous()


def _error(weights: list[Tensor], values: Callable[[Tensor], Tensor]) -> str:
    wrong = sum(float((values(weight) - weight).square().sum()) for weight in weights)
    right = sum(float(weight.square().sum()) for weight in weights)
    return f"{(wrong / right) ** 0.5:.4f}"


def _rounded(scheme: Scheme, weight: Tensor) -> Tensor:
    return round_to_nearest(weight, scheme).values()


def _by_ggml(library: Path, kind: BlockType, weight: Tensor) -> Tensor:
    """A weight rounded and decoded by llama.cpp's quantizer and the gguf package."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    ggml = ctypes.CDLL(str(library))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_init(kind.number)
    rows, columns = weight.shape
    blocks = np.zeros((rows, columns // kind.elements * kind.nbytes), np.uint8)
    place, sizes = ctypes.c_void_p(weight.data_ptr()), map(ctypes.c_int64, (0, rows, columns))
    ggml.ggml_quantize_chunk(kind.number, place, blocks.ctypes.data_as(ctypes.c_void_p), *sizes, None)
    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType(kind.number)))


if __name__ == "__main__":
    main()
