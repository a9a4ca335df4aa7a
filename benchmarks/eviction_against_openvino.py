"""KV compression against OpenVINO GenAI's cache eviction, at the same number of rows: recall and decode speed.

    python -m benchmarks.eviction_against_openvino --python PEERS/bin/python --json eviction.json

Both read the same GGUF file of SmolLM2 135M (how to install the peer: contestants/openvino_eviction.py), keep keys
and values in 8 bits, as OpenVINO does by default, and find numbers in prose (recall_tasks.py). Decode speed is that of
one request behind a prompt: the time for `--steps` more tokens, each round in turn, as medians.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter

import llmc
from benchmarks.contestants.protocol import ROOT, ContestantProcess
from benchmarks.llama_1b import machine
from benchmarks.measure import ROUNDS, alternate
from benchmarks.quality import build
from benchmarks.real_model_files import MODELS, fetched, numbers_of
from benchmarks.recall import TEXT
from benchmarks.recall_tasks import Task, needles
from llmc.runtime.threads import available_cores

# What answers prompts: their next tokens, and seconds.
Answer = Callable[[Sequence[Sequence[int]], int], tuple[Sequence[Sequence[int]], float]]
POLICIES = ("none", "snapkv:budget={rows},window=16,pool=7,every=16,sinks=32", "lru:budget={rows},recent=128,every=16")
_BLOCK = 16


@dataclass(frozen=True)
class Found:
    """Of one contestant.

    Args:
        name: With its policy.
        recall: Share of the numbers' tokens that are right.
        step: Median seconds of a decode step behind a prompt.
        first: Median seconds of a prompt and its first token.
    """

    name: str
    recall: float
    step: float
    first: float


def main() -> None:
    """Measure, and print the table as it stands in docs/kv-compression.md."""
    given = parse_arguments()
    given.cache.mkdir(parents=True, exist_ok=True)
    file = fetched(MODELS["smollm2"], given.cache)
    tokenizer = numbers_of(file, given.cache) / "tokenizer.json"
    task = needles(given.length, given.depths, given.prompts, tokenizer, TEXT)
    with ExitStack() as stack:
        answers = dict(_peers(file, given, stack))
        answers |= dict(_engines(file, task, given, stack))
        found = measure(answers, task, given.steps, given.rounds)
    print("\n".join(table(found)))
    if given.json is not None:
        about = {"machine": machine(given.threads), "date": date.today().isoformat(), "rows_kept": given.rows}
        about |= {"length": given.length, "prompts": given.prompts, "depths": given.depths, "steps": given.steps}
        given.json.write_text(json.dumps(about | {"rows": [asdict(each) for each in found]}, indent=1) + "\n")


def measure(answers: dict[str, Answer], task: Task, steps: int, rounds: int) -> list[Found]:
    """Recall of all prompts, then speed in turn."""
    recalls = {name: _recall(answer, task) for name, answer in answers.items()}
    prompt = task.prompts[0][:1]
    firsts, longs = (
        alternate({name: partial(_seconds, answer, prompt, tokens) for name, answer in answers.items()}, rounds)
        for tokens in (1, 1 + steps)
    )
    return [
        Found(name, recalls[name], (longs[name].median - firsts[name].median) / steps, firsts[name].median)
        for name in answers
    ]


def table(found: Sequence[Found]) -> Iterator[str]:
    """As Markdown."""
    yield "| contestant | tokens of the number that are right | decode step | prompt |"
    yield "|---|--:|--:|--:|"
    for each in found:
        yield f"| {each.name} | {each.recall:.0%} | {1e3 * each.step:.2f} ms | {each.first:.2f} s |"


def _seconds(answer: Answer, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    return answer(prompts, tokens)[1]


def _recall(answer: Answer, task: Task) -> float:
    right = count = 0
    for prompts, answers in zip(task.prompts, task.answers, strict=True):
        said, _ = answer(prompts, max(map(len, answers)))
        for row, wanted in zip(said, answers, strict=True):
            right += sum(one == other for one, other in zip(row, wanted, strict=False))
            count += len(wanted)
    return right / count


def _peers(file: Path, given: argparse.Namespace, stack: ExitStack) -> Iterator[tuple[str, Answer]]:
    for rows in (0, given.rows):
        name = f"OpenVINO GenAI, {f'{rows} rows stay' if rows else 'no eviction'}"
        arguments = [str(file), "--threads", str(given.threads), "--rows", str(rows)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        module = "benchmarks.contestants.openvino_eviction"
        yield name, stack.enter_context(ContestantProcess(name, given.python, module, arguments, environment)).answer


def _engines(file: Path, task: Task, given: argparse.Namespace, stack: ExitStack) -> Iterator[tuple[str, Answer]]:
    longest = task.longest + given.steps + _BLOCK
    options = {"kv_cache": "int8", "max_model_len": longest, "max_sequences": 4, "block_size": _BLOCK}
    for template in POLICIES:
        text = template.format(rows=given.rows)
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmc-bench-"))) / "engine.llmc"
        build(file, path, "cpu", options | ({} if text == "none" else {"kv_compression": text}))
        engine = stack.enter_context(llmc.load(path, threads=given.threads, prefix_cache=False))
        yield f"llmc, `{text}`", _answer_of(engine)


def _answer_of(engine: llmc.Engine) -> Answer:
    def answer(prompts: Sequence[Sequence[int]], tokens: int) -> tuple[Sequence[Sequence[int]], float]:
        greedy = llmc.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        begin = perf_counter()
        said = [engine.generate([list(prompt)], greedy)[0].choices[0].token_ids for prompt in prompts]
        return said, perf_counter() - begin

    return answer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of an environment with openvino-genai")
    parser.add_argument("--rows", type=int, default=512, help="that stay of a prompt")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt, a multiple of 32")
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4, help="of each depth")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cache", type=Path, default=Path("examples/out/real-models"), help="of fetched models")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
