"""Everything that is measured on a GPU, in one command of less than nine minutes that needs no package index.

    python -m benchmarks.gpu_suite
    python -m benchmarks.gpu_suite --dry-run                  # what it would run, on any machine
    python -m benchmarks.gpu_suite --only llmc compiled       # some of it, with what that needs

First the gpu tests (while checkpoints of random weights are written and their engines built), then this GPU's ceilings,
whole models and kernels alone: llmc, Hugging Face eager, and Hugging Face with torch.compile (max-autotune and CUDA
graphs, each shape compiled by itself), both decoding with a static cache. Each runs in a process of its own with a time
limit: one that fails costs only its own figures. Tables of ratios and of shares of the ceilings measured in the same
run; JSON in benchmarks/results/<gpu>/, written anew after every job: a run that is cut short leaves what it has.

A machine without a package index needs wheels of what its Python lacks. Of a usual PyTorch installation that is
pydantic and pytest with what they need; for its Python 3.12, where there is an index:

    pip download --only-binary=:all: --python-version 3.12 --platform manylinux_2_17_x86_64 -d wheels \\
        --no-deps pydantic==2.11.7 pydantic-core==2.33.2 annotated-types typing-inspection
    python -m benchmarks.gpu_suite --wheels wheels --json RESULTS/gpu_suite.json      # there

Checkpoints and engines take 42 GB in --directory and are used again by the next call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.measurement import Measurement, parse
from benchmarks.gpu.outcome import Outcome

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
BUDGET_SECONDS = 520.0
# What matters most comes first.
SHAPES = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b")
# Of engines on several GPUs, where there are as many.
RANKS = (2, 4, 8)
QUANTIZED, SCHEME = "llama-3.1-8b", "int4"
OURS = "llmc"
NEEDED = ("torch", "triton", "transformers", "cuda.bindings", "pydantic", "networkx", "safetensors", "pytest")
# What has tests for a GPU, and nothing more: others import what a machine with a GPU need not have.
GPU_TESTS = (
    "tests/codegen/triton",
    "tests/runtime/executors/test_cuda.py",
    "tests/runtime/executors/test_gpu_stages.py",
)
INDEX_TESTS = ("tests/codegen/triton/test_index_width.py", "tests/codegen/triton/kernels/test_large_offsets.py")
TEST_PROCESSES = 8


@dataclass(frozen=True)
class Job:
    """A process. limit: seconds. beside: started without waiting for its end.

    after: jobs to wait for. needs: jobs to wait for without which this one cannot run.
    """

    name: str
    arguments: tuple[str, ...]
    limit: float
    beside: bool = False
    after: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def jobs(directory: Path, shapes: Sequence[str], gpus: int = 1) -> tuple[Job, ...]:
    """All of them in order: a budget that runs out cuts from the end. gpus: of the machine."""
    module = (sys.executable, "-m")
    found = [Job(f"prepare {s}", (*module, "benchmarks.gpu.prepare", s, str(directory)), 240, True) for s in shapes]
    # Numbers need a GPU for themselves: the tests are what preparing may disturb.
    # The wide ones take tens of gigabytes each, so they run one by one; most of the others' time is compiling.
    together = ("-n", str(TEST_PROCESSES)) if is_installed("xdist") else ()
    without = [word for path in INDEX_TESTS for word in ("--ignore", path)]
    tests = (*module, "pytest", "-m", "gpu", *together, *without, *GPU_TESTS)
    found.append(Job("gpu tests", tests, 150))
    found.append(Job("gpu index tests", (*module, "pytest", "-m", "gpu", *INDEX_TESTS), 90))
    prepared = tuple(job.name for job in found if job.beside)
    found.append(Job("probe", (*module, "benchmarks.gpu.probe"), 40, after=prepared))
    for shape in shapes:
        model, engine = str(directory / shape), str(directory / f"{shape}.llmc")
        needs = (f"prepare {shape}",)
        peer = (*module, "benchmarks.gpu.hf_model", model, "--compiled")
        found.append(Job(f"llmc {shape}", (*module, "benchmarks.gpu.llmc_model", model, engine), 60, needs=needs))
        found.append(Job(f"HF compiled {shape}", peer, 150, needs=needs))
    found.append(Job("kernels", (*module, "benchmarks.gpu.kernels"), 60))
    for shape in shapes:
        eager = (*module, "benchmarks.gpu.hf_model", str(directory / shape))
        found.append(Job(f"HF eager {shape}", eager, 40, needs=(f"prepare {shape}",)))
    if QUANTIZED in shapes:
        # Against the bf16 engine of the same checkpoint; last, because rounding so many weights takes a while.
        prepare = (*module, "benchmarks.gpu.prepare", QUANTIZED, str(directory), "--quantize", SCHEME)
        found.append(Job(f"prepare {QUANTIZED} {SCHEME}", prepare, 150, needs=(f"prepare {QUANTIZED}",)))
        engine = str(directory / f"{QUANTIZED}.{SCHEME}.llmc")
        run = (*module, "benchmarks.gpu.llmc_model", str(directory / QUANTIZED), engine, "--scheme", SCHEME)
        required = (f"prepare {QUANTIZED}", f"prepare {QUANTIZED} {SCHEME}")
        found.append(Job(f"llmc {QUANTIZED} {SCHEME}", run, 60, needs=required))
    for ranks in (each for each in RANKS if each <= gpus):
        several = (*module, "benchmarks.gpu.ranks", str(directory / shapes[0]), "--ranks", str(ranks))
        found.append(Job(f"llmc {shapes[0]} on {ranks} GPUs", several, 180, needs=(f"prepare {shapes[0]}",)))
    return tuple(found)


def ranks_not_measured(gpus: int) -> str | None:
    """What the part for several GPUs lacks on a machine with so many; None for nothing."""
    lacking = [str(ranks) for ranks in RANKS if ranks > gpus]
    if not lacking:
        return None
    return (
        f"not measured: engines on {', '.join(lacking)} GPUs, of which this machine has {gpus}; they want that many of "
        "one kind on one machine, NVLink between them (nvidia-smi topo -m), and NCCL in torch"
    )


def selected(planned: Sequence[Job], words: Sequence[str]) -> tuple[Job, ...]:
    """The jobs with one of the words in their names, the probe, and what they need; all of them without words."""
    if not words:
        return tuple(planned)
    wanted = {job.name for job in planned if job.name == "probe" or any(word in job.name for word in words)}
    wanted |= {name for job in planned if job.name in wanted for name in job.needs}
    return tuple(
        replace(job, after=tuple(name for name in job.after if name in wanted)) for job in planned if job.name in wanted
    )


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    gpus = gpu_count()
    planned = selected(jobs(arguments.directory, arguments.shapes, gpus), arguments.only)
    if (lacking := ranks_not_measured(gpus)) is not None:
        console.print(lacking, highlight=False)
    if arguments.dry_run:
        console.print(plan_table(planned, arguments.budget))
        return
    gpu = gpu_name()
    if gpu is None:
        sys.exit("there is no CUDA device: run this on a machine with a GPU, or look at the plan with --dry-run")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    if arguments.wheels is not None:
        install_wheels(arguments.wheels, arguments.directory / "packages")
    missing = [name for name in NEEDED if not is_installed(name)]
    if missing:
        sys.exit(
            f"this Python lacks {', '.join(missing)}; where there is a package index: pip download --only-binary=:all: "
            f"--python-version {sys.version_info.major}.{sys.version_info.minor} -d wheels {' '.join(missing)}; "
            "then carry the folder here and give --wheels wheels"
        )

    def save(outcomes: Sequence[Outcome]) -> Path:
        return write_results(outcomes, gpu, arguments.json)

    outcomes = run_jobs(planned, arguments.budget, console, save)
    for table in tables([m for outcome in outcomes for m in outcome.measurements]):
        console.print(table)
    console.print(outcome_table(outcomes))
    path = save(outcomes)
    console.print(f"{gpu}; {path}; reproduce: python -m benchmarks.gpu_suite", highlight=False)
    if any(outcome.status != "ok" for outcome in outcomes):
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="list what would run; needs no GPU")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "llmc-gpu-suite")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for everything")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels for what this machine's Python lacks")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="jobs with one of these in their names")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<gpu>/gpu_suite.json")
    return parser.parse_args()


def gpu_name() -> str | None:
    """The first CUDA device's name, asked in a process of its own: this one takes none of its memory."""
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return answer.stdout.strip() or None


def gpu_count() -> int:
    """How many CUDA devices there are, asked as gpu_name is."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def is_installed(name: str) -> bool:
    """Whether a module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # The package that it would be in.
        return False


def install_wheels(wheels: Path, packages: Path) -> None:
    """Into a folder of their own, for this process and for the jobs."""
    files = [str(path) for path in sorted(wheels.glob("*.whl"))]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", str(packages), *files], check=True)
    sys.path.append(str(packages))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(packages))))


def run_jobs(
    planned: Sequence[Job],
    budget: float,
    console: Console,
    save: Callable[[Sequence[Outcome]], object] = lambda outcomes: None,
) -> list[Outcome]:
    """Run all in order within the budget; whatever happens to one, the next is run. save: told all that is known."""
    end = time.monotonic() + budget
    beside: dict[str, _Running] = {}
    done: dict[str, Outcome] = {}

    def finish(running: _Running) -> None:
        outcome = running.wait(end)
        done[outcome.job] = outcome
        console.print(f"{outcome.job}: {outcome.status}, {outcome.seconds:.0f} s", highlight=False)
        for m in outcome.measurements:
            console.print(f"    {m.group}, {m.case}, {m.contestant}: {m.median * 1e3:.3f} ms", highlight=False)
        save([done[j.name] for j in planned if j.name in done])

    for job in planned:
        for name in (*job.after, *job.needs):
            if name in beside:
                finish(beside.pop(name))
        broken = [name for name in job.needs if done[name].status != "ok"]
        if broken:
            done[job.name] = Outcome(job.name, f"not run: {broken[0]} {done[broken[0]].status}", 0.0, ())
        elif time.monotonic() >= end:
            done[job.name] = Outcome(job.name, "not run: the budget is spent", 0.0, ())
        elif job.beside:
            beside[job.name] = _Running(job)
        else:
            finish(_Running(job))
    for running in beside.values():
        finish(running)
    return [done[job.name] for job in planned]


class _Running:
    """A job's process, its output going to a file: a killed one's is kept."""

    def __init__(self, job: Job) -> None:
        self._job, self._start = job, time.monotonic()
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in wait)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            job.arguments, stdout=self._output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )

    def wait(self, end: float) -> Outcome:
        limit = min(self._start + self._job.limit, end)
        try:
            code = self._process.wait(max(0.0, limit - time.monotonic()))
            status = "ok" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = "timed out"
        self._output.seek(0)
        lines = self._output.read().splitlines()
        self._output.close()
        found = tuple(m for m in map(parse, lines) if m is not None)
        tail = "" if status == "ok" else "\n".join(lines[-30:])
        return Outcome(self._job.name, status, time.monotonic() - self._start, found, tail)


def tables(measurements: Sequence[Measurement]) -> list[Table]:
    """A table for each group: time, our ratio to each peer, and shares of the ceilings where a case has them."""
    ceilings = {m.case: m for m in measurements if m.group == "probe"}
    copy, product = ceilings.get("copy"), ceilings.get("bf16 product")
    bandwidth = copy.bytes / copy.median if copy else None
    rate = product.flops / product.median if product else None
    found = []
    for group in dict.fromkeys(m.group for m in measurements):
        table = Table(title=group, title_justify="left")
        for column in ("case", "", "time", "spread", "llmc is", "GB/s", "of copy", "TFLOP/s", "of peak"):
            table.add_column(column, justify="left" if column in ("case", "") else "right")
        inside = [m for m in measurements if m.group == group]
        ours = {m.case: m for m in inside if m.contestant == OURS}
        for m in sorted(inside, key=lambda m: list(dict.fromkeys(i.case for i in inside)).index(m.case)):
            table.add_row(*_row(m, ours.get(m.case), bandwidth, rate))
        found.append(table)
    return found


def _row(m: Measurement, ours: Measurement | None, bandwidth: float | None, rate: float | None) -> list[str]:
    spread = (max(m.seconds) - min(m.seconds)) / m.median
    is_ours = m.contestant == OURS or m.contestant.startswith(f"{OURS} candidate")
    ratio = "" if ours is None or is_ours else f"{m.median / ours.median:.2f}x"
    moved, done = m.bytes / m.median, m.flops / m.median
    return [
        m.case,
        m.contestant,
        f"{m.median * 1e3:.3f} ms",
        f"{spread:.0%}",
        ratio,
        f"{moved / 1e9:.0f}" if moved else "",
        f"{moved / bandwidth:.0%}" if moved and bandwidth else "",
        f"{done / 1e12:.1f}" if done else "",
        f"{done / rate:.0%}" if done and rate else "",
    ]


def plan_table(planned: Sequence[Job], budget: float) -> Table:
    """What would run."""
    limits = sum(job.limit for job in planned if not job.beside)
    table = Table(title=f"plan: at most {budget:.0f} s (limits sum to {limits:.0f} s)", title_justify="left")
    for column in ("job", "limit", "waits for", "command"):
        table.add_column(column, overflow="fold")
    for job in planned:
        needs = "runs beside the next" if job.beside else ", ".join((*job.after, *job.needs))
        table.add_row(job.name, f"{job.limit:.0f} s", needs, " ".join(("python", *job.arguments[1:])))
    return table


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """How every job ended, with the last words of those that failed."""
    table = Table(title="jobs", title_justify="left")
    for column in ("job", "status", "seconds", "last words"):
        table.add_column(column, overflow="fold")
    for outcome in outcomes:
        last = "\n".join(outcome.tail.splitlines()[-3:])
        table.add_row(outcome.job, outcome.status, f"{outcome.seconds:.0f}", last)
    return table


def results_folder(gpu: str) -> Path:
    """Where a GPU's results lie."""
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def write_results(outcomes: Sequence[Outcome], gpu: str, path: Path | None) -> Path:
    """Everything as JSON, under the GPU's name unless a path is given."""
    path = path or results_folder(gpu) / "gpu_suite.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"gpu": gpu, "outcomes": [asdict(outcome) for outcome in outcomes]}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
