"""An engine of generated C++ and one of onnxruntime, both in fp32, in turn: prefill, and decode by batch size.

    python -m benchmarks.onnxruntime_engine examples/models/bard-6m --threads 2

Both are built unless they are in --directory. `ratio` is the time of onnxruntime over that of C++, of runs in turn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import llmc
from benchmarks.measure import alternate
from llmc import Engine, SamplingParams

TARGETS = ("cpu", "onnxruntime")
PREFILL, CONTEXT, STEPS = 256, 64, 32
BATCHES = (1, 4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--directory", type=Path, help="where the engines are kept; default: nowhere")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, help="write the seconds here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmc-bench-") as scratch:
        record = measured(given.model, given.directory or Path(scratch), given.rounds, given.threads)
    Console().print(speed_table(given.model.name, record))
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measured(model: Path, directory: Path, rounds: int, threads: int | None) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by what was measured and target."""
    engines: dict[str, Engine] = {}
    for target in TARGETS:
        path = directory / f"{target}.llmc"
        if not path.exists():
            llmc.build(model, path, target=target, dtype="float32", max_model_len=PREFILL + STEPS + 1)
        engines[target] = llmc.load(path, threads=threads, prefix_cache=False)
    record: dict[str, dict[str, list[float]]] = {}
    cases = {f"prefill {PREFILL}": (1, PREFILL, 1)} | {f"decode, batch {n}": (n, CONTEXT, STEPS) for n in BATCHES}
    for name, shape in cases.items():
        runs: dict[str, Callable[[], float]] = {t: partial(seconds, e, *shape) for t, e in engines.items()}
        record[name] = {target: list(sample.seconds) for target, sample in alternate(runs, rounds).items()}
    for engine in engines.values():
        engine.close()
    return record


def seconds(engine: Engine, batch: int, context: int, tokens: int) -> float:
    """Of a prefill, or of each decode step: from the first token of all to the last."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, engine.info.vocab_size, context).tolist() for _ in range(batch)]
    first = _elapsed(engine, prompts, 1)
    return first if tokens == 1 else (_elapsed(engine, prompts, tokens) - first) / (tokens - 1)


def _elapsed(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    engine.generate(prompts, params)
    return time.perf_counter() - start


def speed_table(name: str, record: dict[str, Any]) -> Table:
    """Tokens a second, and the ratio of runs in turn."""
    table = Table(title=f"{name} in fp32, tokens a second", title_justify="left")
    for column in ("", "C++", "onnxruntime", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for case, times in record.items():
        count = PREFILL if case.startswith("prefill") else int(case.rpartition(" ")[2])
        ours, theirs = (float(np.median(times[target])) for target in TARGETS)
        ratio = float(np.median([b / a for a, b in zip(times["cpu"], times["onnxruntime"], strict=True)]))
        table.add_row(case, f"{count / ours:.0f}", f"{count / theirs:.0f}", f"{ratio:.2f}x")
    return table


if __name__ == "__main__":
    main()
