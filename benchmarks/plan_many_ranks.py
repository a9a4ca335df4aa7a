"""How long it takes to cut a large model into ranks and to plan its program, and how much memory; no weight is read.

    python -m benchmarks.plan_many_ranks [--model examples/configs/llama-3-70b] [--ranks 8] [--quantize int4]

Captures the model of config.json alone, runs every pass, and lowers for this machine's CPU. Prints seconds of the clock
and of the processor for each, and the process's largest memory.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.codegen.cpp.lowering import lower
from llmc.graph.capture import capture
from llmc.options import parse_options
from llmc.passes.model_data import ModelData
from llmc.passes.pipeline import default, essential
from llmc.passes.runner import run_pipeline
from llmc.targets import host_target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=Path("examples/configs/llama-3-70b"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--quantize", default="int4")
    arguments = parser.parse_args()
    options = parse_options({"tensor_parallel_size": arguments.ranks, "quantize": arguments.quantize})
    gc.disable()  # As `llmc build` does.
    with timed("capture"):
        captured = capture(arguments.model, options, may_lack_weights=True)
    with timed("passes"):
        data = ModelData(captured.source)
        graph = run_pipeline(captured.graph, default(), options, data=data, essential=essential()).graph
    with timed("lower"):
        program = lower(graph, host_target(), options).program
    weights = sum(slot.nbytes for slot in program.weights)
    print(f"{len(program.launches)} launches, {weights / 1e9:.2f} GB of weights on each of {program.ranks} ranks")
    print(f"largest memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    print(f"reproduce: {sys.executable} -m benchmarks.plan_many_ranks --model {arguments.model}")


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Print what a part took."""
    clock, processor = time.perf_counter(), time.process_time()
    yield
    print(f"{name:10} {time.perf_counter() - clock:6.1f} s, {time.process_time() - processor:6.1f} s of the processor")


if __name__ == "__main__":
    main()
