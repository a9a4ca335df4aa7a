"""What is worth it: bits, perplexity and decoding speed of dense, rounded, sparse and pruned forms of one model.

    python -m benchmarks.sparse_table --json results.json
    python -m benchmarks.sparse_table --forms dense "channels=0.25,heads=0.25,layers=2" --speed-model DIR --ids FILE

Each form is built into an engine for this CPU (or named one that is there) and reads the whole held-out text of the
shipped model; then all decode in turn, each in a process of its own. Bits are those of all weights, scales, masks and
the output projection included, over the parameters of the model as it came. With --speed-model another model decodes:
the shipped one is so small that its weights stay in the caches, where fewer bytes gain little. Its random weights say
nothing of quality.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

import llmc
from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.llama_1b import CONTEXT, machine, write
from benchmarks.measure import Sample, alternate
from benchmarks.quality import ROOT
from llmc.compiler import build
from llmc.debug.compare import Perplexity, windows
from llmc.engine_format import read_engine

DENSE = "dense"
ZEROS = ("0.5", "0.6", "0.7", "2:4")
METHODS = ("magnitude", "wanda", "sparsegpt")
FORMS: Mapping[str, Mapping[str, str]] = {
    DENSE: {},
    "int8": {"quantize": "int8"},
    "w8a8": {"quantize": "w8a8"},
    "w4a8": {"quantize": "w4a8"},
    **{name: {"sparsity": name} for name in (f"{method}:{zeros}" for zeros in ZEROS for method in METHODS)},
    "sparsegpt:0.5 int8": {"sparsity": "sparsegpt:0.5", "quantize": "int8"},
    "sparsegpt:0.5 w8a8": {"sparsity": "sparsegpt:0.5", "quantize": "w8a8"},
    "channels=0.125": {"prune": "channels=0.125"},
    "channels=0.25": {"prune": "channels=0.25"},
    "heads=0.5": {"prune": "heads=0.5"},
    "layers=1": {"prune": "layers=1"},
    "layers=2": {"prune": "layers=2"},
    "channels=0.125 w8a8": {"prune": "channels=0.125", "quantize": "w8a8"},
    "channels=0.25,heads=0.25,layers=2": {"prune": "channels=0.25,heads=0.25,layers=2"},
}
# The last one is for models of more than two KV heads.
_SHIPPED = tuple(FORMS)[:-1]


def main() -> None:
    """Measure, and print the table as it stands in docs/sparsity.md."""
    arguments = parse_arguments()
    console = Console(stderr=True)
    record: dict[str, Any] = {"machine": machine(arguments.threads), "forms": {}}
    # A long run may be ended before its last form, and go on later.
    known = json.loads(arguments.json.read_text())["forms"] if arguments.json and arguments.json.exists() else {}
    model = arguments.speed_model or arguments.model
    engines: dict[str, Path] = {}
    for form in arguments.forms:
        engines[form] = engine_of(model, form, arguments.ids or arguments.calibration, arguments.directory)
        record["forms"][form] = known.get(form, {}) | {"bits": bits(engines[form], engines[DENSE])}
        if arguments.speed_model is None and "perplexity" not in record["forms"][form]:
            record["forms"][form]["perplexity"] = perplexity(engines[form], arguments.text, arguments.length)
        write(record, arguments.json)
        console.print(form, record["forms"][form])
    if not arguments.without_speed:
        for form, sample in decoding(engines, arguments).items():
            record["forms"][form] |= {"seconds": list(sample.seconds), "spread": sample.spread}
    write(record, arguments.json)
    print(markdown(record["forms"]))
    console.print(record["machine"])


def parse_arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "bard-6m")
    parser.add_argument("--text", type=Path, default=ROOT / "data" / "heldout.txt")
    parser.add_argument("--calibration", type=Path, default=ROOT / "data" / "calibration.txt")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=_SHIPPED, metavar="FORM", help="dense comes first")
    parser.add_argument("--speed-model", type=Path, help="measure only how fast the forms of this one decode")
    parser.add_argument("--ids", type=Path, help="token ids to calibrate the --speed-model on")
    parser.add_argument("--directory", type=Path, default=ROOT / "out", help="for engines")
    parser.add_argument("--without-speed", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=512, help="that a round decodes")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def engine_of(model: Path, form: str, calibration: Path, directory: Path) -> Path:
    """Built now, unless it is there."""
    path = directory / f"{model.resolve().name}-{re.sub(r'[^a-z0-9.]+', '-', form)}.llmc"
    if not path.exists():
        options: Any = {"max_model_len": 1024, "calibration_sequences": 32, **FORMS[form]}
        build(model, path, dtype="bfloat16", calibration=str(calibration), **options)
    return path


def bits(engine: Path, dense: Path) -> float:
    """Of all weights together, a parameter of the model as it came."""
    read = partial(read_engine, check_weights=False, check_machine=False)
    return 8 * read(engine).manifest.memory["weights"] / read(dense).manifest.model.parameters


def perplexity(path: Path, text: Path, length: int) -> float:
    """Of the whole text, in windows."""
    total = Perplexity()
    with llmc.load(path) as engine:
        for tokens in windows(engine.tokenize(text.read_text(encoding="utf-8")), length, None, engine.tokenizer.prefix):
            total.add(engine.logits(tokens), tokens)
    return total.value


def decoding(engines: Mapping[str, Path], arguments: argparse.Namespace) -> dict[str, Sample]:
    """Seconds of a decode step of one request, all engines in turn."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    module, threads = "benchmarks.contestants.llmc_engine", ["--threads", str(arguments.threads)]
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        for form, path in engines.items():
            process = ContestantProcess(form, sys.executable, module, [str(path), *threads], environment=environment)
            runs[form] = partial(stack.enter_context(process).decode, 1, CONTEXT, arguments.steps)
        return alternate(runs, arguments.rounds)


def markdown(forms: Mapping[str, Mapping[str, Any]]) -> str:
    """The table."""
    lines = ["| form | bits a weight | perplexity | decoding, tokens/s | over dense |", "|---|--:|--:|--:|--:|"]
    for name, found in ((name, forms[name]) for name in FORMS if name in forms):
        quality = f"{found['perplexity']:.2f}" if "perplexity" in found else ""
        speed, gain = "", ""
        if "seconds" in found:
            median, dense = (Sample(tuple(forms[form]["seconds"])).median for form in (name, DENSE))
            speed, gain = f"{1 / median:.0f}" if median < 0.01 else f"{1 / median:.1f}", f"{dense / median:.2f}x"
        lines.append(f"| `{name}` | {found['bits']:.2f} | {quality} | {speed} | {gain} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
