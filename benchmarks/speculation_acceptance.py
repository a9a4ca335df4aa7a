"""What comes of drafts, whatever a machine's speed: bard-6m with each method, as many drafts as there is room for.

    python -m benchmarks.speculation_acceptance --json results.json

Tokens a step with drafts, and the share of drafts that are accepted: of a draft model, of Medusa heads that are trained
here and of an EAGLE-3 draft by the size of their trees, of lookahead by its window, and of prompt lookup.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmc import SamplingParams, load, train_medusa
from llmc.compiler import build
from llmc.runtime.engine_stats import SpeculationStats
from llmc.runtime.speculation.gate import Gate

EXAMPLES = Path("examples")
TREE_SIZES = (3, 4, 8, 12, 16, 24)
EAGLE_SIZES = (3, 4, 8, 12, 16)
WINDOWS = ((5, 3, 5), (10, 3, 10), (7, 4, 7), (4, 5, 4))
NAMES = (
    *("KING", "RICHARD", "JULIET", "ROMEO", "HAMLET", "BRUTUS", "PORTIA", "DUKE", "QUEEN", "NURSE", "FIRST"),
    *("CITIZEN", "MESSENGER"),
)
OPENINGS = ("My lord,", "What news", "I will not")
TOKENS = 160


class AlwaysOpen(Gate):
    """As many drafts as there is room for."""

    def drafts(self, requests: int, room: int) -> int:
        """Whatever steps take."""
        return max(0, min(self.most, room // requests - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("examples/out"), help="for what is built")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    target, draft = (built(name, arguments.directory) for name in ("bard-6m", "bard-draft"))
    medusa = with_heads(target, arguments.directory)
    record = {
        "bard-6m with bard-draft": of_draft_model(target, draft, arguments.threads),
        "Medusa, greedy, tokens a step by drafts": by_size(medusa, {"method": "medusa"}, arguments.threads),
        **of_eagle3(with_eagle3(arguments.directory), arguments.threads),
        "tokens a step by window, n-gram and guesses": of_lookahead(target, arguments.threads),
    }
    for table in tables(record):
        Console().print(table)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def of_draft_model(target: Path, draft: Path, threads: int | None) -> dict[str, float]:
    """Tokens a step of greedy requests with four drafts; accepted drafts where each step has one."""

    def counted(most: int, temperature: float, method: str = "invariant") -> SpeculationStats:
        given = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": most}
        return outcome(target, {**given, "rejection_sample_method": method}, prompts(32), temperature, TOKENS, threads)

    found = {"greedy, k = 4: tokens a step": counted(4, 0.0).tokens_a_step}
    for method in ("invariant", "rejection", "typical"):
        stats = counted(1, 1.0, method)
        found[f"T = 1, {method}: accepted"] = stats.accepted_tokens / stats.draft_tokens
    return found


def of_eagle3(engine: Path, threads: int | None) -> dict[str, dict[str, float]]:
    """Of chains and of trees, greedy and at T = 1."""
    return {
        f"EAGLE-3, {name}, T = {temperature:g}, tokens a step by drafts": by_size(
            engine, {"method": "eagle3", "tree_width": width}, threads, EAGLE_SIZES, temperature
        )
        for name, width in (("chains", 1), ("trees", 4))
        for temperature in (0.0, 1.0)
    }


def by_size(
    engine: Path,
    given: Mapping[str, object],
    threads: int | None,
    sizes: Sequence[int] = TREE_SIZES,
    temperature: float = 0.0,
) -> dict[str, float]:
    """Tokens a step by the number of drafts, of speakers' words and of pieces of the held-out text."""
    text = (EXAMPLES / "data" / "heldout.txt").read_text(encoding="utf-8")
    begun = {"speakers": prompts(16), "held-out text": [text[begin : begin + 120] for begin in range(0, 64000, 4000)]}
    return {
        f"{name}; {size}": outcome(
            engine, {**given, "num_speculative_tokens": size}, texts, temperature, 96, threads
        ).tokens_a_step
        for name, texts in begun.items()
        for size in sizes
    }


def of_lookahead(target: Path, threads: int | None) -> dict[str, float]:
    """Tokens a step, greedy and at T = 0.8; and those of prompt lookup."""
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    configurations: dict[str, dict[str, Any]] = {
        f"{window}, {size}, {guesses}": {"method": "lookahead", "window": window, "ngram": size, "guesses": guesses}
        for window, size, guesses in WINDOWS
    }
    return {
        f"{name}; T = {temperature:g}": outcome(target, given, prompts(4), temperature, 200, threads).tokens_a_step
        for name, given in (configurations | {"prompt lookup": ngram}).items()
        for temperature in (0.0, 0.8)
    }


def outcome(
    engine: Path,
    speculation: Mapping[str, object],
    texts: Sequence[str],
    temperature: float,
    tokens: int,
    threads: int | None,
) -> SpeculationStats:
    """What came of the drafts of all requests, eight at a time: those have room for all their drafts, or for most."""
    with load(engine, threads=threads, speculation=dict(speculation)) as opened:
        drafting = opened.loop.speculation
        assert drafting is not None
        drafting._gate = AlwaysOpen(drafting._gate.most)
        asked = params(len(texts), temperature, tokens)
        for begin in range(0, len(texts), 8):
            opened.generate(list(texts[begin : begin + 8]), asked[begin : begin + 8])
        return drafting.stats


def prompts(count: int) -> list[str]:
    """Speakers with a few words of theirs."""
    return [f"{name}:\n{words}" for words in OPENINGS for name in NAMES][:count]


def params(count: int, temperature: float, tokens: int) -> list[SamplingParams]:
    """So many tokens for each, with a seed of its own where they are drawn."""
    seeds = [seed if temperature else None for seed in range(count)]
    return [SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True) for seed in seeds]


def built(name: str, directory: Path) -> Path:
    """The engine of a shipped model, built unless it is there."""
    path = directory / f"{name}.llmc"
    if not path.exists():
        build(EXAMPLES / "models" / name, path)
    return path


def with_heads(target: Path, directory: Path) -> Path:
    """bard-6m with heads that are trained on what it writes, unless that is there."""
    path, heads = directory / "bard-6m-medusa.llmc", directory / "heads" / "bard-6m.safetensors"
    if not heads.exists():
        train_medusa(target, EXAMPLES / "data" / "calibration.txt", heads)
    if not path.exists():
        build(EXAMPLES / "models" / "bard-6m", path, speculative=heads)
    return path


def with_eagle3(directory: Path) -> Path:
    """bard-6m with the shipped draft, built unless it is there."""
    path = directory / "bard-6m-eagle3.llmc"
    if not path.exists():
        build(EXAMPLES / "models" / "bard-6m", path, speculative=EXAMPLES / "models" / "bard-eagle3")
    return path


def tables(record: Mapping[str, Mapping[str, float]]) -> Iterator[Table]:
    """One for each method."""
    for title, found in record.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in found.items():
            table.add_row(name, f"{value:.3f}")
        yield table


if __name__ == "__main__":
    main()
