"""How long a build and a start take: the shipped model, in fresh processes.

    python -m benchmarks.build

Cold: with an empty cache, so that the hand-written kernels are compiled too. Warm: with them cached; once with the
model captured anew each time, once with its captured graph cached as well, which is what a second build finds by
itself.
Start: from the process's start to the first token, imports and hash checks included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

MODEL = Path(__file__).parent.parent / "examples" / "models" / "bard-6m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine.llmc"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LLMC_CACHE_DIR": str(Path(folder) / "cache")}
        build = [sys.executable, "-m", "llmc", "build", str(arguments.model), "-o", str(engine), "--force"]
        run = [sys.executable, "-m", "llmc", "run", str(engine), "--prompt", "The king", "--max-tokens", "1"]
        record = {
            "cold build": [seconds(build, environment)],
            "warm build, model captured anew": [
                seconds(build, environment | {"LLMC_CAPTURE_CACHE": "0"}) for _ in range(arguments.rounds)
            ],
            "warm build": [seconds(build, environment) for _ in range(arguments.rounds)],
            "start to first token": [seconds(run, environment) for _ in range(arguments.rounds + 1)][1:],
        }
    table = Table(title=f"{arguments.model.name}, fresh processes", title_justify="left")
    for column in ("", "median", "slowest"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, values in record.items():
        table.add_row(name, f"{statistics.median(values):.2f} s", f"{max(values):.2f} s")
    Console().print(table)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """Wall time of a command that must succeed."""
    start = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
