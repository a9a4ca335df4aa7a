"""The tables of speculation of benchmarks/real_models.py: what each drafter brings with a real chat model's answers.

Requests are of two sorts: answers that repeat much of their prompt (a summary, a text or a program with one change)
and one that does not (a story). Heads are trained on what the model itself writes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import llmc
from benchmarks.measure import alternate
from benchmarks.quality import build
from benchmarks.speculation_acceptance import outcome
from llmc import SamplingParams
from llmc.runtime.engine import Engine

ROOT = Path(__file__).parent.parent / "examples"
DRAFTERS: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "medusa": {"method": "medusa"},
}
NONE = "no drafts"
# Greedily a small model soon repeats itself, whatever it is asked.
TEMPERATURES = (0.0, 0.8)
# A file beside Medusa's heads: the shares of tokens kept apart that each had right when they were trained.
SHARES = "medusa-shares.json"
_TOKENS = 128
# Requests of each sort, and characters of the text or program that each is about.
_REQUESTS, _ABOUT = 8, 600
_LONGEST = 2048


def requests(text: str, program: str, rounds: int = 1) -> dict[str, list[str]]:
    """Prompts for a chat model that writes ChatML, by kind of request: eight of each kind for each round."""
    prose, lines = _pieces(text, rounds), _pieces(program, rounds)
    asked = {
        "a text with a name changed": ("Copy this text and change the name Hamlet to Henry, nothing else:", prose),
        "a program with a name changed": ("Rename the variable path to place in this code and print all of it:", lines),
        "a summary": ("Summarize this text, with quotations:", prose),
        "a story": ("Tell a new story that begins after this scene:", prose),
    }
    return {
        name: [f"<|im_start|>user\n{task}\n\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in about]
        for name, (task, about) in asked.items()
    }


def _pieces(text: str, rounds: int) -> list[str]:
    count = _REQUESTS * rounds
    step = len(text) // count
    return [text[begin : begin + _ABOUT] for begin in range(0, step * count, step)]


def engines(model: Path, directory: Path, head_tokens: int, threads: int) -> dict[str, Path]:
    """An engine for each drafter, made in the directory unless it is there; Medusa's if heads are to be trained."""
    plain, with_heads, heads = (directory / name for name in ("plain.llmc", "medusa.llmc", "heads/heads.safetensors"))
    if not plain.exists():
        build(model, plain, "cpu", {"max_model_len": _LONGEST})
    found = {"ngram": plain, "suffix": plain}
    if head_tokens:
        if not heads.exists():
            text = ROOT / "data" / "calibration.txt"
            trained = llmc.train_medusa(plain, text, heads, tokens=head_tokens, chat=True, threads=threads)
            shares = [(head.top_1, head.top_5) for head in trained.heads]
            (directory / SHARES).write_text(json.dumps(shares), encoding="utf-8")
        if not with_heads.exists():
            build(model, with_heads, "cpu", {"max_model_len": _LONGEST, "speculative": heads})
        found["medusa"] = with_heads
    return found


def accepted(built: Mapping[str, Path], asked: Mapping[str, Sequence[str]], threads: int) -> Iterator[str]:
    """What comes of as many drafts as there is room for, whatever the machine's speed."""
    yield f"| drafter | answer | {' | '.join(f'T = {each:g}: tokens a step | accepted' for each in TEMPERATURES)} |"
    yield f"|---|---|{'--:|--:|' * len(TEMPERATURES)}"
    for drafter, engine in built.items():
        for kind, prompts in asked.items():
            found = [
                outcome(engine, DRAFTERS[drafter], prompts, temperature, _TOKENS, threads)
                for temperature in TEMPERATURES
            ]
            figures = (f"{s.tokens_a_step:.2f} | {s.accepted_tokens / max(s.draft_tokens, 1):.0%}" for s in found)
            yield f"| `{drafter}` | {kind} | {' | '.join(figures)} |"


def shares_of_heads(directory: Path) -> Iterator[str]:
    """What Medusa's heads had right of the tokens that were kept apart from their training; nothing without heads."""
    file = directory / SHARES
    if file.exists():
        yield ""
        yield "| Medusa head | right | among five |"
        yield "|---|--:|--:|"
        for number, (first, of_five) in enumerate(json.loads(file.read_text(encoding="utf-8")), 1):
            yield f"| {number} | {first:.2f} | {of_five:.2f} |"


def timed(built: Mapping[str, Path], asked: Mapping[str, Sequence[str]], threads: int, rounds: int) -> Iterator[str]:
    """Tokens a second of one request at a time, with the gate that decides how much is drafted, in turn.

    Each round has requests that no earlier one had, because `suffix` remembers answers.
    """
    opened: dict[str, Engine] = {NONE: llmc.load(next(iter(built.values())), threads=threads)}
    for drafter, engine in built.items():
        opened[drafter] = llmc.load(engine, threads=threads, speculation=dict(DRAFTERS[drafter]))
    try:
        yield f"| answer | {' | '.join(opened)} |"
        yield f"|---|{'--:|' * len(opened)}"
        for kind, prompts in asked.items():
            runs: dict[str, Callable[[], float]] = {
                name: partial(_seconds, engine, iter(prompts)) for name, engine in opened.items()
            }
            samples = alternate(runs, rounds)
            rates = (f"{_TOKENS * _REQUESTS / samples[name].median:.1f}" for name in opened)
            yield f"| {kind} | {' | '.join(rates)} |"
    finally:
        for each in opened.values():
            each.close()


def _seconds(engine: Engine, prompts: Iterator[str]) -> float:
    """Of a round's answers, one after the other."""
    begun = time.perf_counter()
    for prompt in islice(prompts, _REQUESTS):
        engine.generate([prompt], SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - begun
