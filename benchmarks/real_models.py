"""What llmc's forms of real models lose and gain: SmolLM2 135M, Gemma 3 270M and MiniLM, which the package index holds.

    python -m benchmarks.real_models quality --json quality.json --llama-cpp-python ../peers/bin/python
    python -m benchmarks.real_models quality --model gemma3 --windows 4
    python -m benchmarks.real_models speculation --medusa-tokens 50000 --json speculation.json
    python -m benchmarks.real_models speed --llama-cpp-python ../peers/bin/python
    python -m benchmarks.real_models speculation-speed
    python -m benchmarks.real_models embeddings --sentence-transformers-python ../peers-st/bin/python
    python -m benchmarks.real_models calibration --llm-compressor-python ../peers-lc/bin/python

pip fetches the models into --cache once (340 MB). `quality`: perplexity of held-out text, KL and equal first choices
against the same numbers, unrounded, in fp32; --windows says how much of the text is judged, else all. A --json file
that was begun is gone on with. `speculation`: tokens per step by drafter, of answers that repeat their prompt and of
others. These two do not depend on a machine's speed. `speed`: prefill and decode beside llama.cpp on the
same file and transformers on its numbers.
`speculation-speed`: tokens per second with and without drafts. `embeddings`: texts per second beside transformers and
beside sentence-transformers, where a Python with it is named. `calibration`: how long methods take that look at
activations.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import real_model_speculation as drafts
from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.llama_1b import WORKLOADS, machine
from benchmarks.measure import alternate
from benchmarks.quality import build
from benchmarks.real_model_calibration import calibration_times
from benchmarks.real_model_embeddings import embedding_rates
from benchmarks.real_model_files import MODELS, fetched, numbers_of
from benchmarks.real_model_quality import (
    FORMS,
    LLAMA_CPP,
    UNROUNDED,
    Form,
    Record,
    Windows,
    llama_cpp_name,
    of_form,
    of_llama_cpp,
)
from benchmarks.table_record import record_table
from llmc.debug.compare import windows
from llmc.runtime.loading import load

ROOT = Path(__file__).parent.parent / "examples"
# Of tables that are about one model.
MODEL_OF = {"embeddings": "minilm", "speculation": "smollm2", "speculation-speed": "smollm2"}
# The directory of engines with drafts in the cache.
SPECULATION = "speculation"
MEASURED = ("prefill 512", "decode, batch 1", "decode, batch 16")


def main() -> None:
    """One table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--model", choices=list(FORMS), default="smollm2")
    parser.add_argument(
        "--forms", nargs="+", default=[], metavar="FORM", help="of quality: these rows or schemes; default: all"
    )
    parser.add_argument("--text", type=Path, default=ROOT / "data" / "heldout.txt")
    parser.add_argument("--calibration", type=Path, default=ROOT / "data" / "calibration.txt")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="windows that are judged; default: the whole text")
    parser.add_argument("--medusa-tokens", type=int, default=0, help="train Medusa heads on so many; default: no heads")
    parser.add_argument("--cache", type=Path, default=Path("examples/out/real-models"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp-python", help="a Python with llama-cpp-python")
    parser.add_argument("--sentence-transformers-python", help="a Python with sentence-transformers")
    parser.add_argument("--llm-compressor-python", help="a Python with llm-compressor")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    lines = list(TABLES[given.table](given))
    print("\n".join(lines))
    if given.json is not None and given.table != "quality":
        about = {"machine": machine(given.threads), "model": MODEL_OF.get(given.table, given.model)}
        record_table(given.json, about, lines)


def quality(given: argparse.Namespace) -> Iterator[str]:
    """Every form of a model on the same tokens; what the record has already is not measured again."""
    of_model = {form.name: form for form in FORMS[given.model]}
    forms = [of_model.get(name) or Form(name, {"quantize": name}) for name in given.forms] or FORMS[given.model]
    kinds = LLAMA_CPP if given.llama_cpp_python else ()
    of_text = {"text": given.text.name, "length": given.length, "windows": given.windows, "prefix": "the tokenizer's"}
    record = Record.at(given.json, {"machine": machine(given.threads), "model": given.model, **of_text})
    missing = [form for form in forms if not record.has(form.name)]
    missing_kinds = [kind for kind in kinds if not record.has(llama_cpp_name(kind))]
    if missing or missing_kinds or not record.rows:
        file = fetched(MODELS[given.model], given.cache)
        numbers = numbers_of(file, given.cache)
        with tempfile.TemporaryDirectory() as directory:
            judged = _judged(numbers, Path(directory), given)
            if not record.rows:
                record.add(judged.unrounded())
            for form in missing:
                model = form.model(file, numbers, given.cache)
                record.add(of_form(form, model, judged, given.calibration, given.threads))
            for kind in missing_kinds:
                record.add(of_llama_cpp(given.llama_cpp_python, file, kind, judged, given.threads))
    yield from record.lines()


def _judged(numbers: Path, directory: Path, given: argparse.Namespace) -> Windows:
    """The windows of the text, with what the unrounded engine says of them."""
    plain = directory / "plain.llmc"
    build(numbers, plain, "cpu", UNROUNDED)
    with load(plain, threads=given.threads) as engine:
        ids = engine.tokenize(given.text.read_text(encoding="utf-8"))
        pieces = windows(ids, given.length, given.windows, engine.tokenizer.prefix)
    return Windows(plain, pieces, directory, given.threads)


def speed(given: argparse.Namespace) -> Iterator[str]:
    """Beside llama.cpp on the same file; and of its numbers, in 4 bits, and in bfloat16 in transformers."""
    path = fetched(MODELS[given.model], given.cache)
    numbers = numbers_of(path, given.cache)
    threads = ["--threads", str(given.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        contestants: list[ContestantProcess] = []
        forms: dict[str, tuple[Path, dict[str, Any]]] = {
            "llmc, default": (path, {}),
            "llmc, q4_k": (numbers, {"quantize": "q4_k,lm_head=q4_k"}),
        }
        for name, (model, options) in forms.items():
            engine = Path(directory) / f"{name}.llmc"
            build(model, engine, "cpu", options)
            ours = "benchmarks.contestants.llmc_engine"
            process = ContestantProcess(name, sys.executable, ours, [str(engine), *threads], environment)
            contestants.append(stack.enter_context(process))
        if given.llama_cpp_python:
            theirs = "benchmarks.contestants.llama_cpp"
            process = ContestantProcess("llama.cpp", given.llama_cpp_python, theirs, [str(path), *threads], environment)
            contestants.append(stack.enter_context(process))
        command = [str(numbers), *threads]
        peer = ContestantProcess(
            "transformers", sys.executable, "benchmarks.contestants.hf_eager", command, environment
        )
        contestants.append(stack.enter_context(peer))
        yield f"| tokens a second | {' | '.join(each.name for each in contestants)} |"
        yield f"|---|{'--:|' * len(contestants)}"
        for workload in (each for each in WORKLOADS if each.name in MEASURED):
            runs: dict[str, Callable[[], float]] = {each.name: partial(workload.run, each) for each in contestants}
            samples = alternate(runs, given.rounds)
            rates = (f"{workload.tokens / samples[each.name].median:.1f}" for each in contestants)
            yield f"| {workload.name} | {' | '.join(rates)} |"


def speculation(given: argparse.Namespace) -> Iterator[str]:
    """What comes of drafts, whatever the machine's speed."""
    yield from drafts.accepted(_drafting(given), _asked(given), given.threads)
    if given.medusa_tokens:
        yield from drafts.shares_of_heads(given.cache / SPECULATION)


def speculation_speed(given: argparse.Namespace) -> Iterator[str]:
    """Tokens per second with and without drafts."""
    # A round more: `alternate` warms up by one.
    asked = _asked(given, given.rounds + 1)
    yield from drafts.timed(_drafting(given), asked, given.threads, given.rounds)


def _drafting(given: argparse.Namespace) -> dict[str, Path]:
    """Engines of SmolLM2, which answers chats, by drafter."""
    directory = given.cache / SPECULATION
    directory.mkdir(exist_ok=True)
    return drafts.engines(fetched(MODELS["smollm2"], given.cache), directory, given.medusa_tokens, given.threads)


def _asked(given: argparse.Namespace, rounds: int = 1) -> dict[str, list[str]]:
    program = "".join(file.read_text(encoding="utf-8") for file in sorted(ROOT.glob("*.py")))
    return drafts.requests(given.text.read_text(encoding="utf-8"), program, rounds)


def embeddings(given: argparse.Namespace) -> Iterator[str]:
    """Of MiniLM."""
    path = fetched(MODELS[MODEL_OF["embeddings"]], given.cache)
    text, peer = given.text.read_text(encoding="utf-8"), given.sentence_transformers_python
    yield from embedding_rates(path, text, given.threads, given.rounds, peer)


def calibration(given: argparse.Namespace) -> Iterator[str]:
    """Of the numbers of a model."""
    numbers = numbers_of(fetched(MODELS[given.model], given.cache), given.cache)
    yield from calibration_times(numbers, given.calibration, given.threads, given.llm_compressor_python)


TABLES: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "quality": quality,
    "speed": speed,
    "speculation": speculation,
    "speculation-speed": speculation_speed,
    "embeddings": embeddings,
    "calibration": calibration,
}

if __name__ == "__main__":
    main()
