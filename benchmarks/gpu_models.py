"""Whole models on one GPU within three minutes: llmc, and Hugging Face with torch.compile and CUDA graphs.

    python -m benchmarks.gpu_models build engines --target h200      # on any machine: a few megabytes for each engine
    python -m benchmarks.gpu_models measure engines                  # on the GPU: tables, and benchmarks/results/<gpu>

Engines are built without weights, which are drawn on the device (gpu/weightless.py). The peers compile all their shapes
side by side first. Then each contestant has the GPU for itself in its turn: llmc in bf16 and with quantized weights,
and the peer, model by model. `gpu_suite` measures more, on real files, and takes longer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.gpu.contestant import GO, READY, Contestant
from benchmarks.gpu.measurement import Measurement, parse, report
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.workloads import Decode, Prefill, decode_bytes, prefill_flops
from benchmarks.gpu_suite import SHAPES, gpu_name, results_folder, tables, write_results

# Engines that are built, by model: without a scheme, and with each of these.
SCHEMES = {"llama-3.1-8b": ("int4", "fp8"), "llama-3.2-1b": ("int4",), "qwen3-0.6b": ()}
WORKLOADS = (Decode(1, 1024), Decode(32, 1024), Decode(1, 8192), Prefill(512), Prefill(8192))
# With CUDA graphs; of torch.compile's modes the one that compiles in seconds.
MODE = "reduce-overhead"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "measure", "contestant"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", default="h200", help="of engines that are built")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--peers", nargs="*", choices=SHAPES, default=list(SHAPES[:2]), help="models that peers run too"
    )
    parser.add_argument("--budget", type=float, default=180.0, help="seconds for measuring")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<gpu>/gpu_models.json")
    parser.add_argument("--name", help="of a contestant: llmc, llmc SCHEME or HF")
    arguments = parser.parse_args()
    if arguments.what == "build":
        build_engines(arguments.directory, arguments.shapes, arguments.target)
    elif arguments.what == "contestant":
        run_contestant(arguments.directory, arguments.shapes[0], arguments.name)
    else:
        measure(arguments.directory, arguments.shapes, arguments.peers, arguments.budget, arguments.json)


def build_engines(directory: Path, shapes: Sequence[str], target: str) -> None:
    """Every engine that is not there yet."""
    from benchmarks.gpu.weightless import build_weightless, write_hollow_checkpoint

    sizes = {"max_model_len": 8704, "max_batch_tokens": 8192, "max_sequences": 32, "max_logit_rows": 32}
    with tempfile.TemporaryDirectory() as scratch:
        for shape in shapes:
            model = write_hollow_checkpoint(shape, Path(scratch) / shape)
            for scheme in ("", *SCHEMES[shape]):
                path = engine_path(directory, shape, scheme)
                if path.exists():
                    continue
                start = time.perf_counter()
                build_weightless(model, path, target=target, quantize=scheme, **sizes)
                print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
            (directory / f"{shape}.json").write_text((model / "config.json").read_text())


def engine_path(directory: Path, shape: str, scheme: str) -> Path:
    """Where an engine lies; scheme: empty for one in bf16."""
    return directory / ".".join(filter(None, (shape, scheme, "llmc")))


def measure(directory: Path, shapes: Sequence[str], peers: Sequence[str], budget: float, path: Path | None) -> None:
    """Measure all contestants in turn, print tables and write the record."""
    end, console = time.monotonic() + budget, Console(width=140)
    gpu = gpu_name()
    if gpu is None:
        sys.exit("there is no CUDA device: engines can be built here, and measured on a machine with a GPU")
    path = path or results_folder(gpu) / "gpu_models.json"

    def contestant(shape: str, name: str) -> Contestant:
        module = [sys.executable, "-m", "benchmarks.gpu_models", "contestant", str(directory)]
        return Contestant(f"{shape}, {name}", [*module, "--shapes", shape, "--name", name], end)

    compiling = {shape: contestant(shape, "HF") for shape in peers if shape in shapes}
    probe = subprocess.run([sys.executable, "-m", "benchmarks.gpu.probe"], capture_output=True, text=True)
    ceilings = tuple(filter(None, map(parse, probe.stdout.splitlines())))
    outcomes = [Outcome("probe", "ok" if len(ceilings) == 2 else "failed", 0.0, ceilings, probe.stderr[-2000:])]
    for shape, peer in compiling.items():
        console.print(f"{shape}, HF: ready after {peer.prepared() or float('inf'):.0f} s", highlight=False)
    for shape in shapes:
        built = [scheme for scheme in ("", *SCHEMES[shape]) if engine_path(directory, shape, scheme).exists()]
        names = [" ".join(("llmc", scheme)).strip() for scheme in built]
        for name in [*names, *(["HF"] if shape in compiling else [])]:
            outcome = (compiling[shape] if name == "HF" else contestant(shape, name)).measured()
            outcomes.append(outcome)
            console.print(f"{outcome.job}: {outcome.status}, {outcome.seconds:.0f} s", highlight=False)
            write_results(outcomes, gpu, path)
    for table in tables([m for outcome in outcomes for m in outcome.measurements]):
        console.print(table)
    for outcome in outcomes:
        if outcome.status != "ok":
            console.print(f"{outcome.job}: {outcome.status}\n{outcome.tail}", highlight=False)
    console.print(f"{gpu}; {path}", highlight=False)


def run_contestant(directory: Path, shape: str, name: str) -> None:
    """Prepare every workload, wait for the turn, measure."""
    config = json.loads((directory / f"{shape}.json").read_text())
    if name == "HF":
        from benchmarks.gpu.hf_model import HfModel

        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "config.json").write_text(json.dumps(config))
            peer = HfModel(scratch, MODE, drawn=True)
        measures = [(work, peer.prepared(work)) for work in WORKLOADS]
    else:
        from benchmarks.gpu.llmc_model import LlmcModel

        ours = LlmcModel(engine_path(directory, shape, name.removeprefix("llmc").strip()), drawn=True)
        measures = [(work, partial(ours.measure, work)) for work in WORKLOADS]
    print(READY, flush=True)
    if sys.stdin.readline().strip() != GO:
        return
    for work, seconds in measures:
        label = f"HF torch.compile {MODE}, static cache" if name == "HF" else name
        found = Measurement(shape, work.name, label, seconds())
        if isinstance(work, Prefill):
            report(replace(found, flops=prefill_flops(config, work)))
        else:
            report(replace(found, bytes=decode_bytes(config, work) if name in ("llmc", "HF") else 0.0))


if __name__ == "__main__":
    main()
