"""What llmc's forms of real models lose and gain: SmolLM2 135M, Gemma 3 270M and MiniLM, which the package index holds.

    python -m benchmarks.real_models quality --json quality.json
    python -m benchmarks.real_models quality --windows 8 --llama-cpp-python ../peers/bin/python
    python -m benchmarks.real_models speed --llama-cpp-python ../peers/bin/python
    python -m benchmarks.real_models speculation
    python -m benchmarks.real_models embeddings

pip fetches the models into --cache once (340 MB). `quality`: perplexity of held-out text, KL and equal first choices
against the same file's numbers, unrounded, in fp32. Methods that look at data are calibrated on the part of the text
after the windows, so that calibration and judgement see the same kind of text and not the same tokens; --windows says
how much is judged. `speed`: prefill and decode beside llama.cpp on the same file, in turn. `speculation`: tokens a step
by drafter, of answers that repeat their prompt and of answers that do not. `embeddings`: texts a second beside
transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import llmc
from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.llama_1b import WORKLOADS, machine
from benchmarks.measure import alternate
from benchmarks.quality import build, divergence
from benchmarks.real_model_files import MODELS, fetched
from benchmarks.speculation_acceptance import outcome
from llmc.debug.compare import Logits, Perplexity, windows
from llmc.runtime.engine import Engine

ROOT = Path(__file__).parent.parent / "examples"
UNROUNDED = {"quantize": "none", "dtype": "float32"}
_SCHEMES = (
    *("int8", "w8a8", "w8a8-smoothquant", "fp8", "int6", "int5", "int4", "int4:g32:asym", "int4-gptq", "int4-awq"),
    *("w4a8", "w4a8-gptq", "nf4", "mxfp4"),
)
# By model, what it is built with; the first is what the others are compared with.
TRIALS: dict[str, tuple[dict[str, str], ...]] = {
    "smollm2": (
        UNROUNDED,
        {},
        *({"quantize": scheme} for scheme in _SCHEMES),
        *(UNROUNDED | {"kv_cache": codes} for codes in ("int8", "fp8", "int4")),
        *({"quantize": "none", "sparsity": zeros} for zeros in ("sparsegpt:0.5", "wanda:0.5")),
    ),
    "gemma3": (UNROUNDED, {}),
}
# Built and calibrated in minutes, so only when asked for.
MIXED = {"quantize": "auto:4.5"}
MEASURED = ("prefill 512", "decode, batch 1", "decode, batch 16")
DRAFTERS: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
}
ASKED = {
    "repeats its prompt": "Copy this text and change the name Hamlet to Henry, nothing else:\n\n{}",
    "does not": "Tell a story that begins after this scene:\n\n{}",
}


@dataclass(frozen=True)
class Row:
    """divergence: mean KL from the unrounded engine, in nats. same: the share of tokens whose likeliest next token is
    the unrounded engine's. seconds: processor time of the build."""

    form: str
    bits: float | None
    perplexity: float
    divergence: float
    same: float
    seconds: float


def main() -> None:
    """One table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--model", choices=list(TRIALS), default="smollm2")
    parser.add_argument("--forms", nargs="+", default=[], metavar="SCHEME", help="of quality: these instead of all")
    parser.add_argument("--mixed", action="store_true", help="of quality: auto:4.5, too")
    parser.add_argument("--text", type=Path, default=ROOT / "data" / "heldout.txt")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=64, help="windows that are judged")
    parser.add_argument("--cache", type=Path, default=Path("examples/out/real-models"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp-python", help="a Python with llama-cpp-python")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    lines = list(TABLES[given.table](given))
    print("\n".join(lines))
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": machine(given.threads), given.table: lines}, indent=1) + "\n")


def quality(given: argparse.Namespace) -> Iterator[str]:
    """Every form of a model on the same tokens."""
    path = fetched(MODELS[given.model], given.cache)
    trials = TRIALS[given.model]
    if given.forms:
        trials = (UNROUNDED, *({"quantize": form} for form in given.forms))
    if given.mixed:
        trials = (*trials, MIXED)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        plain_path = Path(directory) / "plain.llmc"
        build(path, plain_path, "cpu", UNROUNDED)
        plain = stack.enter_context(llmc.load(plain_path, threads=given.threads))
        pieces, calibration = divided(plain, given, Path(directory))
        yield f"{sum(map(len, pieces))} tokens of {given.text.name}"
        yield "| form | bits a weight | perplexity | KL | same first choice | build, processor seconds |"
        yield "|---|--:|--:|--:|--:|--:|"
        for trial in trials:
            row = of_form(path, trial, plain, pieces, calibration)
            Console(stderr=True).print(row)
            yield line(row)
        if given.llama_cpp_python:
            theirs = of_llama_cpp(given.llama_cpp_python, path, pieces, Path(directory))
            yield line(read("llama.cpp, the same file", plain, pieces, theirs, None, 0.0))


def divided(engine: Engine, given: argparse.Namespace, directory: Path) -> tuple[list[list[int]], Path]:
    """The windows that are judged, half of the text at most, and a file of the tokens after them."""
    ids = list(engine.tokenize(given.text.read_text(encoding="utf-8")))
    pieces = windows(ids, given.length, given.windows)
    judged = min(sum(map(len, pieces)), len(ids) // 2)
    file = directory / "calibration.json"
    file.write_text(json.dumps(ids[judged:]))
    return windows(ids[:judged], given.length), file


def of_form(path: Path, options: dict[str, Any], plain: Engine, pieces: list[list[int]], calibration: Path) -> Row:
    """What a build with these options makes of the text."""
    with tempfile.TemporaryDirectory() as directory:
        engine_path, begun = Path(directory) / "engine.llmc", time.process_time()
        report = build(path, engine_path, "cpu", {**options, "calibration": str(calibration)})
        seconds = time.process_time() - begun
        elements = sum(weight.rows * weight.columns for weight in report.quantized)
        spent = sum(weight.bits * weight.rows * weight.columns for weight in report.quantized)
        name = " ".join(f"{'kv ' if key == 'kv_cache' else ''}{value}" for key, value in options.items())
        with llmc.load(engine_path) as engine:
            found = map(engine.logits, pieces)
            return read(name or "default", plain, pieces, found, spent / elements if elements else None, seconds)


def read(
    name: str, plain: Engine, pieces: list[list[int]], logits: Iterable[Logits], bits: float | None, seconds: float
) -> Row:
    """A row of logits for each window, beside those of the unrounded engine."""
    total, divergences, same = Perplexity(), list[float](), list[float]()
    for piece, found in zip(pieces, logits, strict=True):
        expected = plain.logits(piece)
        total.add(found, piece)
        divergences.append(divergence(expected, found))
        same.append(float((expected.argmax(-1) == found.argmax(-1)).mean()))
    return Row(name, bits, total.value, float(np.mean(divergences)), float(np.mean(same)), seconds)


def line(row: Row) -> str:
    """Of the table."""
    bits = "" if row.bits is None else f"{row.bits:.2f}"
    seconds = f"{row.seconds:.0f}" if row.seconds else ""
    figures = f"{row.perplexity:.3f} | {row.divergence:.4f} | {row.same:.1%} | {seconds}"
    return f"| {row.form} | {bits} | {figures} |"


_LLAMA_CPP = """
import json, sys
import numpy as np
from llama_cpp import Llama
path, pieces, output = sys.argv[1:]
model = Llama(path, n_ctx=1024, n_batch=1024, logits_all=True, verbose=False)
for number, piece in enumerate(json.load(open(pieces))):
    model.reset()
    model.eval(piece)
    np.save(f"{output}/{number}.npy", np.array(model.scores[: len(piece)], dtype=np.float32))
"""


def of_llama_cpp(python: str, path: Path, pieces: list[list[int]], directory: Path) -> Iterator[Logits]:
    """llama.cpp's logits of each window, which a process of its own writes to files."""
    listed = directory / "pieces.json"
    listed.write_text(json.dumps(pieces))
    subprocess.run([python, "-c", _LLAMA_CPP, str(path), str(listed), str(directory)], check=True)
    for number in range(len(pieces)):
        logits: Logits = np.load(directory / f"{number}.npy", allow_pickle=False)
        yield logits


def speed(given: argparse.Namespace) -> Iterator[str]:
    """Beside llama.cpp on the same file."""
    path = fetched(MODELS[given.model], given.cache)
    threads = ["--threads", str(given.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        contestants: list[ContestantProcess] = []
        forms: dict[str, dict[str, Any]] = {"llmc, default": {}, "llmc, w4a8": {"quantize": "w4a8"}}
        for name, options in forms.items():
            engine = Path(directory) / f"{name}.llmc"
            build(path, engine, "cpu", options)
            ours = "benchmarks.contestants.llmc_engine"
            process = ContestantProcess(name, sys.executable, ours, [str(engine), *threads], environment)
            contestants.append(stack.enter_context(process))
        if given.llama_cpp_python:
            theirs = "benchmarks.contestants.llama_cpp"
            process = ContestantProcess("llama.cpp", given.llama_cpp_python, theirs, [str(path), *threads], environment)
            contestants.append(stack.enter_context(process))
        yield f"| tokens a second | {' | '.join(each.name for each in contestants)} |"
        yield f"|---|{'--:|' * len(contestants)}"
        for workload in (each for each in WORKLOADS if each.name in MEASURED):
            runs: dict[str, Callable[[], float]] = {each.name: partial(workload.run, each) for each in contestants}
            samples = alternate(runs, given.rounds)
            rates = (f"{workload.tokens / samples[each.name].median:.1f}" for each in contestants)
            yield f"| {workload.name} | {' | '.join(rates)} |"


def speculation(given: argparse.Namespace) -> Iterator[str]:
    """Of greedy answers to eight prompts of each kind, each about some lines of the text."""
    path = fetched(MODELS["smollm2"], given.cache)
    text = given.text.read_text(encoding="utf-8")
    scenes = [text[begin : begin + 400] for begin in range(0, 8 * 4000, 4000)]
    yield "| drafter | answer | tokens a step | drafts accepted |"
    yield "|---|---|--:|--:|"
    with tempfile.TemporaryDirectory() as directory:
        engine = Path(directory) / "engine.llmc"
        build(path, engine, "cpu", {"max_model_len": 2048})
        for drafter, options in DRAFTERS.items():
            for kind, prompt in ASKED.items():
                asked = [f"<|im_start|>user\n{prompt.format(s)}<|im_end|>\n<|im_start|>assistant\n" for s in scenes]
                stats = outcome(engine, options, asked, 0.0, 128, given.threads)
                accepted = stats.accepted_tokens / max(stats.draft_tokens, 1)
                yield f"| {drafter} | {kind} | {stats.tokens_a_step:.2f} | {accepted:.0%} |"


def embeddings(given: argparse.Namespace) -> Iterator[str]:
    """Texts a second of MiniLM, and how near the vectors are to those of transformers."""
    path = fetched(MODELS["minilm"], given.cache)
    text = given.text.read_text(encoding="utf-8")
    texts = [text[begin : begin + 200] for begin in range(0, 64 * 400, 400)]
    torch.set_num_threads(given.threads)
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    with tempfile.TemporaryDirectory() as directory:
        build(path, Path(directory) / "engine.llmc", "cpu", {"task": "embed", "dtype": "float32"})
        with llmc.load(Path(directory) / "engine.llmc", threads=given.threads) as engine:

            def theirs() -> torch.Tensor:
                given_ids = tokenizer(texts, padding=True, return_tensors="pt")
                with torch.inference_mode():
                    states = model(**given_ids).last_hidden_state
                mask = given_ids["attention_mask"][..., None]
                return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))

            ours = torch.tensor(np.array([np.asarray(each.embedding) for each in engine.embed(texts)]))
            cosine = float((ours * theirs()).sum(-1).min())
            runs = {"llmc": partial(timed, lambda: engine.embed(texts)), "transformers": partial(timed, theirs)}
            samples = alternate(runs, given.rounds)
    yield "| | texts a second | least cosine |"
    yield "|---|--:|--:|"
    yield f"| llmc | {len(texts) / samples['llmc'].median:.0f} | {cosine:.6f} |"
    yield f"| transformers | {len(texts) / samples['transformers'].median:.0f} | |"


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


TABLES: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "quality": quality,
    "speed": speed,
    "speculation": speculation,
    "embeddings": embeddings,
}

if __name__ == "__main__":
    main()
