"""How long quantizing takes and how much memory: the Llama-3.2-1B shape, whole builds in fresh processes.

    python -m benchmarks.quantize --model examples/out/llama-3.2-1b --json results.json

Random weights (written first if the directory has none) and, for the methods that need them, random calibration tokens:
what is measured depends on shapes only. `quantize` is from the pipeline's start to its end, so with rounding and
calibration; `build` is the whole command, peak memory the largest resident set of its process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.random_checkpoint import write_checkpoint

# Seconds of a build, and bytes: what the documentation promises.
PROMISES = {"int4": (60.0, None), "int4-gptq": (15 * 60.0, 6e9)}
# Rounding to the nearest needs no text; with one its report shows each layer's error, which takes a run of the model.
NEED_CALIBRATION = ("gptq", "awq", "smoothquant", "auto")
_BUILD = """
import json, resource, sys
from llmc.compiler import build
calibration = dict(calibration=sys.argv[4], calibration_sequences=int(sys.argv[5]), calibration_length=int(sys.argv[6]))
report = build(sys.argv[1], sys.argv[2], quantize=sys.argv[3], **(calibration if sys.argv[4] else {}))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"stages": report.seconds, "peak": peak, "weights": report.weight_bytes}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("examples/out/llama-3.2-1b"))
    parser.add_argument("--schemes", default="int4,int4-gptq", help="separated by commas")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").exists():
        write_checkpoint("llama-3.2-1b", arguments.model)
    records = {scheme: measure(scheme, arguments) for scheme in arguments.schemes.split(",")}
    table = Table(title=f"quantizing {arguments.model.name}, {arguments.threads} threads", title_justify="left")
    for column in ("scheme", "quantize", "build", "promised", "peak memory", "promised", "weights"):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    for scheme, record in records.items():
        seconds, memory = PROMISES.get(scheme, (None, None))
        table.add_row(
            scheme,
            f"{record['stages']['passes']:.0f} s",
            f"{record['build']:.0f} s",
            "" if seconds is None else f"< {seconds:.0f} s",
            f"{record['peak'] / 1e9:.2f} GB",
            "" if memory is None else f"< {memory / 1e9:.0f} GB",
            f"{record['weights'] / 1e9:.2f} GB",
        )
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")


def measure(scheme: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One build in a process of its own."""
    vocabulary = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        count = arguments.sequences * arguments.length
        np.save(tokens, np.random.default_rng(0).integers(0, vocabulary, count))
        command = [sys.executable, "-c", _BUILD, str(arguments.model), str(Path(folder) / "engine.llmc"), scheme]
        needed = any(method in scheme for method in NEED_CALIBRATION)
        command += [str(tokens) if needed else "", str(arguments.sequences), str(arguments.length)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
        start = time.perf_counter()
        result = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return record | {"build": seconds}


if __name__ == "__main__":
    main()
