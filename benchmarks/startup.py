"""From the start of a process to its first token: llmc against llama.cpp, on random weights of the Llama-3.2-1B shape.

    python -m benchmarks.startup --engine ENGINE --gguf GGUF --llama-cpp-python /path/to/other/venv/bin/python
    python -m benchmarks.startup --engine ENGINE --without-check    # what comparing the weights with their hashes takes

Each measurement is a whole process: the interpreter, the imports, opening the model, a prompt of one token, its first
token, and the end. Both sides are Python processes that are given token ids, take turns, and find their files in the
page cache and their modules compiled, as pip leaves them. llama.cpp does not check its weights; llmc compares them with
their hashes before the token is given away. `benchmarks/llama_1b.py` builds the engine and, with `--llama-cpp-python`,
writes the GGUF file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.llama_1b import machine
from benchmarks.measure import Sample, alternate

LLMC = """
import sys, llmc
with llmc.load(sys.argv[1], threads=int(sys.argv[2]), check_weights=sys.argv[3] == "check") as engine:
    (completion,) = engine.generate([[1]], llmc.SamplingParams(max_tokens=1, ignore_eos=True))
    assert len(completion.token_ids) == 1
"""
# Through the C interface, as benchmarks/contestants/llama_cpp.py uses it: one token in, the logits out.
LLAMA_CPP = """
import ctypes, sys
import llama_cpp
model_options = llama_cpp.llama_model_default_params()
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), model_options)
options = llama_cpp.llama_context_default_params()
options.n_ctx, options.n_threads, options.n_threads_batch = 512, int(sys.argv[2]), int(sys.argv[2])
context = llama_cpp.llama_init_from_model(model, options)
token = (llama_cpp.llama_token * 1)(1)
assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(token, 1)) == 0
logits = llama_cpp.llama_get_logits_ith(context, 0)
count = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
assert max(range(count), key=logits.__getitem__) >= 0
llama_cpp.llama_free(context)
llama_cpp.llama_model_free(model)
"""


def main() -> None:
    arguments = parse_arguments()
    threads = str(arguments.threads)
    runs: dict[str, Callable[[], float]] = {
        "llmc": partial(process_seconds, [sys.executable, "-c", LLMC, str(arguments.engine), threads, "check"])
    }
    if arguments.without_check:
        command = [sys.executable, "-c", LLMC, str(arguments.engine), threads, "trust"]
        runs["llmc, weights not checked"] = partial(process_seconds, command)
    if arguments.gguf is not None:
        command = [arguments.llama_cpp_python, "-c", LLAMA_CPP, str(arguments.gguf), threads]
        runs["llama.cpp"] = partial(process_seconds, command)
    samples = alternate(runs, arguments.rounds)
    console = Console()
    console.print(table(samples))
    console.print(f"{machine(arguments.threads)}; load {os.getloadavg()[0]:.1f}", highlight=False)
    if arguments.json is not None:
        sizes = {"engine_bytes": size(arguments.engine / "weights")}
        sizes |= {} if arguments.gguf is None else {"gguf_bytes": size(arguments.gguf)}
        record = {"machine": machine(arguments.threads), **sizes, "note": arguments.note}
        record["first_token_seconds"] = {name: list(sample.seconds) for name, sample in samples.items()}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, required=True, help="of the 1B shape, for this machine's CPU")
    parser.add_argument("--without-check", action="store_true", help="measure llmc with check_weights=False, too")
    parser.add_argument("--gguf", type=Path, help="llama.cpp's file of the same shape")
    parser.add_argument("--llama-cpp-python", help="the Python of an environment with llama-cpp-python")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--note", help="what else to say in the record, such as what ran beside")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if (arguments.gguf is None) != (arguments.llama_cpp_python is None):
        parser.error("--gguf and --llama-cpp-python go together")
    return arguments


def process_seconds(command: list[str]) -> float:
    """From the start of the process to its end. Raises RuntimeError with the last of what it said if it fails."""
    start = time.perf_counter()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return seconds


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else (path,)))


def table(samples: dict[str, Sample]) -> Table:
    """Medians, spreads, and how many times as long the others take as llmc."""
    found = Table(title="process start to first token", title_justify="left")
    for column in ("", "median", "best", "spread", "llmc is"):
        found.add_column(column, justify="left" if column == "" else "right")
    ours = samples["llmc"].median
    for name, sample in samples.items():
        ratio = "" if name == "llmc" else f"{sample.median / ours:.2f}x"
        times = (f"{sample.median:.3f} s", f"{min(sample.seconds):.3f} s", f"{sample.spread:.0%}")
        found.add_row(name, *times, ratio)
    return found


if __name__ == "__main__":
    main()
