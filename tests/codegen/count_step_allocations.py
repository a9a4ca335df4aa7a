"""Run as a program with count_allocations.cpp preloaded: prints the allocations of a known one and of each step."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from llmc.codegen.cpp.lowering import lower
from llmc.options import BuildOptions
from llmc.targets import host_target
from tests.codegen.engine_harness import OpenEngine, compile_engine, packed_weights
from tests.codegen.test_engine import MIXED_STEPS
from tests.codegen.tiny_models import gemma2


def main(counter_path: str, directory: str) -> None:
    """counter_path: the preloaded library. directory: where to compile the engine."""
    counter = ctypes.CDLL(counter_path)
    counter.count_step.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    counter.count_step.restype = ctypes.c_long
    print(counter.count_one_allocation())
    graph, source = gemma2()
    lowered = lower(graph, host_target(), BuildOptions())
    library = compile_engine(lowered, host_target(), Path(directory))

    def count(function: Any, engine: int, step: Any) -> None:
        print(counter.count_step(ctypes.cast(function, ctypes.c_void_p), engine, step))

    with OpenEngine(library, lowered.program, packed_weights(lowered, source), 2, 4, threads=2) as engine:
        engine.call_step = count
        for step in MIXED_STEPS:
            engine.step(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
