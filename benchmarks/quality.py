"""What quantization costs in quality: perplexity of the shipped trained model on held-out text, scheme by scheme.

    python -m benchmarks.quality --json results.json
    python -m benchmarks.quality --schemes auto:4.5 int4-gptq:g32,lm_head=int4-gptq:g32
    python -m benchmarks.quality --schemes auto:4.5 --text examples/data/heldout.txt examples/data/calibration.txt
    python -m benchmarks.quality --model examples/models/bard-mixture --schemes int8 w4a8 --zeros sparsegpt:2:4

Each scheme is built into an engine for this CPU (or for the reference target, where the CPU has no kernel; the table
says so) and read over the whole text in windows. KL is the mean Kullback-Leibler divergence of its next-token
distributions from the bf16 engine's: it tells schemes apart that perplexity, over some thousand tokens, does not.
Calibration text is another one; of it, where it is named as a text, only what comes after the tokens that methods look
at is read. The second table is of the same function with outliers in its activations: channels of
every norm are scaled up and the weights after it down, by powers of two, so that bf16 loses nothing. Figures are exact
for a machine and repeat; nothing here is timed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file

import llmc
from llmc.debug.compare import Perplexity, windows
from llmc.errors import OptionError
from llmc.runtime.executors.executor import Logits

ROOT = Path(__file__).parent.parent / "examples"
OUTLIER_CHANNELS, OUTLIER_FACTOR = 6, 64.0
# More tokens than any method takes from the beginning of the calibration text.
LOOKED_AT = 16_384


@dataclass(frozen=True)
class Trial:
    """limit: the largest ratio to bf16 that is promised, None for none. below: a trial that must be worse."""

    options: dict[str, Any]
    limit: float | None = None
    below: str | None = None

    @property
    def name(self) -> str:
        return " ".join(f"{'kv ' if key == 'kv_cache' else ''}{value}" for key, value in self.options.items()) or "bf16"


@dataclass(frozen=True)
class Row:
    """ratio: perplexity over that of bf16."""

    name: str
    perplexity: float
    divergence: float
    ratio: float
    bits: float | None
    kv_bytes: int
    target: str
    limit: float | None
    holds: bool


@dataclass(frozen=True)
class Reading:
    """divergence: in nats, from the bf16 engine. bits: of a quantized weight, scales included. kv_bytes: of a token.
    target: what ran it."""

    perplexity: float
    divergence: float
    bits: float | None
    kv_bytes: int
    target: str


TRIALS = (
    Trial({}),
    Trial({"quantize": "int8"}, 1.002),
    Trial({"quantize": "w8a8"}, 1.01),
    Trial({"quantize": "w8a8:xrow"}, 1.01),
    Trial({"quantize": "w8a8-smoothquant"}, 1.01),
    Trial({"quantize": "w8a8:static"}),
    Trial({"quantize": "int4"}),
    Trial({"quantize": "int4-gptq"}, 1.03, "int4"),
    Trial({"quantize": "int4-awq:sym"}, 1.03, "int4"),
    Trial({"quantize": "int4:asym"}),
    Trial({"quantize": "int4-gptq:asym"}, 1.03, "int4:asym"),
    Trial({"quantize": "int4-awq"}, 1.03, "int4:asym"),
    Trial({"quantize": "int6"}),
    Trial({"quantize": "int6-gptq"}, None, "int6"),
    Trial({"quantize": "int5"}),
    Trial({"quantize": "int5-gptq"}, None, "int5"),
    Trial({"quantize": "int4:g64"}),
    Trial({"quantize": "int4:g32"}),
    Trial({"quantize": "w4a8"}),
    Trial({"quantize": "w4a8-gptq"}),
    Trial({"quantize": "nf4"}),
    Trial({"quantize": "mxfp4"}),
    Trial({"quantize": "fp8"}),
    Trial({"quantize": "fp8:block"}),
    Trial({"quantize": "fp8-w8a8"}),
    Trial({"quantize": "auto:4.5"}),
    Trial({"quantize": "auto:4.5:rtn"}),
    Trial({"quantize": "auto:6"}),
    Trial({"kv_cache": "int8"}, 1.005),
    Trial({"kv_cache": "fp8"}),
    Trial({"kv_cache": "int4"}, 1.05),
    Trial({"quantize": "int4-gptq", "kv_cache": "int8"}),
)
OUTLIER_TRIALS = (
    Trial({}),
    Trial({"quantize": "int8"}),
    Trial({"quantize": "w8a8"}),
    Trial({"quantize": "w8a8:xrow"}),
    Trial({"quantize": "w8a8-smoothquant:xrow"}, 1.01, "w8a8:xrow"),
)


def main() -> None:
    """Both tables, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "bard-6m")
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / "data" / "heldout.txt"])
    parser.add_argument("--calibration", type=Path, default=ROOT / "data" / "calibration.txt")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="use no more than this many")
    parser.add_argument("--promised", action="store_true", help="only trials with a promise, and what they must beat")
    parser.add_argument("--schemes", nargs="+", default=[], metavar="SCHEME", help="try these instead, and no outliers")
    parser.add_argument("--zeros", nargs="+", default=[], metavar="SPARSITY", help="and these, as of --sparsity")
    parser.add_argument("--prune", nargs="+", default=[], metavar="PARTS", help="and these, as of --prune")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.schemes or arguments.zeros or arguments.prune:
        rounded = (Trial({"quantize": scheme}) for scheme in arguments.schemes)
        zeros = (Trial({"sparsity": zeros}) for zeros in arguments.zeros)
        trials = (Trial({}), *rounded, *zeros, *(Trial({"prune": parts}) for parts in arguments.prune))
        tables = measure("model", arguments.model, trials, arguments)
    else:
        tables = measure("model", arguments.model, TRIALS, arguments)
        with tempfile.TemporaryDirectory() as directory:
            outliers = with_outliers(arguments.model, Path(directory) / "outliers")
            tables |= measure("model with outlier activations", outliers, OUTLIER_TRIALS, arguments)
    for title, rows in tables.items():
        print(f"\n{title}\n\n{markdown(rows)}")
    if arguments.json is not None:
        content = {title: [asdict(row) for row in rows] for title, rows in tables.items()}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def measure(title: str, model: Path, trials: tuple[Trial, ...], arguments: argparse.Namespace) -> dict[str, list[Row]]:
    """Build with each, and read every text; the first is what the others are compared with. By title of a table."""
    beaten = {trial.below for trial in trials}
    chosen = [t for i, t in enumerate(trials) if i == 0 or not arguments.promised or t.limit or t.name in beaten]
    tables: dict[str, list[Row]] = {f"{title}, {text.name}": [] for text in arguments.text}
    with tempfile.TemporaryDirectory() as directory:
        plain = Path(directory) / "plain.llmc"
        build(model, plain, "cpu", {"dtype": "bfloat16"})
        for trial in track(chosen, model.name, console=Console(stderr=True)):
            for rows, reading in zip(tables.values(), read(model, trial, plain, arguments), strict=True):
                ratio = reading.perplexity / rows[0].perplexity if rows else 1.0
                found = {row.name: row for row in rows}
                holds = trial.limit is None or ratio <= trial.limit
                if trial.below in found:
                    holds = holds and reading.perplexity < found[trial.below].perplexity
                rows.append(Row(trial.name, ratio=ratio, limit=trial.limit, holds=holds, **asdict(reading)))
                Console(stderr=True).print(f"{trial.name}: {ratio:.4f}, KL {reading.divergence:.2e}")
    return tables


def read(model: Path, trial: Trial, plain: Path, arguments: argparse.Namespace) -> list[Reading]:
    """What each text says of a trial's engine beside the one at `plain`."""
    options = {**trial.options, "calibration": str(arguments.calibration), "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as directory:
        path, target = Path(directory) / "engine.llmc", "cpu"
        try:
            report = build(model, path, target, options)
        except OptionError:
            target = "reference"
            report = build(model, path, target, options)
        elements = sum(w.rows * w.columns for w in report.quantized)
        bits = sum(w.bits * w.rows * w.columns for w in report.quantized) / elements if elements else None
        with llmc.load(path) as engine, llmc.load(plain) as plain_engine:
            found: list[Reading] = []
            for text in arguments.text:
                total, divergences = Perplexity(), list[float]()
                ids = engine.tokenize(text.read_text(encoding="utf-8"))
                unseen = ids[LOOKED_AT:] if text.samefile(arguments.calibration) else ids
                for tokens in windows(unseen, arguments.length, arguments.windows, engine.tokenizer.prefix):
                    logits = engine.logits(tokens)
                    total.add(logits, tokens)
                    divergences.append(divergence(plain_engine.logits(tokens), logits))
                mean = sum(divergences) / len(divergences)
                found.append(Reading(total.value, mean, bits, report.kv_bytes, target))
    return found


def divergence(plain: Logits, logits: Logits) -> float:
    """The mean over tokens of KL(plain ‖ other), in nats. Both [tokens, vocabulary]."""
    log_p, log_q = (torch.from_numpy(each).log_softmax(-1) for each in (plain, logits))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def build(model: Path, path: Path, target: str, options: dict[str, Any]) -> Any:
    """The build's report."""
    from llmc.compiler import build as build_engine

    return build_engine(model, path, target=target, **options)


def with_outliers(model: Path, output: Path) -> Path:
    """A Llama checkpoint of the same function, a few channels of each norm OUTLIER_FACTOR times as large."""
    shutil.copytree(model, output)
    tensors = load_file(output / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for name in [n for n in tensors if n.endswith("layernorm.weight")]:
        prefix, _, norm = name.removesuffix(".weight").rpartition(".")
        channels = torch.randperm(len(tensors[name]), generator=generator)[:OUTLIER_CHANNELS]
        tensors[name][channels] *= OUTLIER_FACTOR
        for reader in readers[norm]:
            tensors[f"{prefix}.{reader}.weight"][:, channels] /= OUTLIER_FACTOR
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return output


def markdown(rows: list[Row]) -> str:
    """The table as it stands in docs/quality.md."""
    lines = [
        "| scheme | bits a weight | KV bytes a token | perplexity | over bf16 | promised | KL |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        bits = "16" if row.bits is None else f"{row.bits:.2f}"
        promised = "" if row.limit is None else f"≤ {row.limit}{'' if row.holds else ' **missed**'}"
        name = row.name if row.target == "cpu" else f"{row.name} (reference)"
        figures = (
            f"{bits} | {row.kv_bytes} | {row.perplexity:.3f} | {row.ratio:.4f} | {promised} | {row.divergence:.2e}"
        )
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
