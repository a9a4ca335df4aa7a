"""Quantize a GGUF file with llama.cpp, every matrix to the same type, or as a mixture; runs in the peer's environment.

PEER_PYTHON -m benchmarks.quantize_gguf llama-1b-bf16.gguf Q4_0 llama-1b-q4_0.gguf
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import llama_cpp

TYPES = {
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "IQ4_XS": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
}
# What is a mixture by its name.
MIXED = frozenset({"Q4_K_M"})


def quantize_gguf(source: Path, kind: str, output: Path) -> None:
    """What `llama-quantize SOURCE OUTPUT KIND` does, with --pure unless the kind is a mixture."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = TYPES[kind]
    parameters.pure = kind not in MIXED
    # The source may hold codes already: their numbers are then rounded again.
    parameters.allow_requantize = True
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(output).encode(), ctypes.byref(parameters))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("kind", choices=TYPES)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    quantize_gguf(arguments.source, arguments.kind, arguments.output)


if __name__ == "__main__":
    main()
