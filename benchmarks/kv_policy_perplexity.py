"""What KV compression costs on prose: perplexity after the cut, by policy, budget and cache format.

    python -m benchmarks.kv_policy_perplexity --model smollm2 --json perplexity.json
    python -m benchmarks.kv_policy_perplexity --model gemma3 --caches auto --policies none "h2o:budget={budget}"
    python -m benchmarks.kv_policy_perplexity --records perplexity.json other.json

An engine reads the beginning of a passage of held-out text, its policy drops rows, and the next tokens of the passage
are forced one by one, whatever the engine would choose. Each policy is built into an engine for this CPU with fp32
weights, whose requests choose the budget. KL and same first choices compare with the engine that keeps all rows and
does not round them. All policies keep the last 128 rows, so that caches with exact newest rows are compared in the same
way. `random`, the baseline, runs in transformers with masks (recall_masks.py) and keeps the first 4 rows in addition.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.progress import track

import llmc
from benchmarks.forced_text import Logits, Passage, Prediction, forced_logits, passages, prediction
from benchmarks.llama_1b import machine
from benchmarks.quality import build
from benchmarks.real_model_files import MODELS, fetched, numbers_of
from benchmarks.recall import CALIBRATION, NONE, TEXT, rows_of, with_budget
from benchmarks.recall_masks import RANDOM, logits_by
from llmc.errors import OptionError
from llmc.runtime.threads import available_cores

EXACT = "auto"
# With the placeholders of benchmarks/recall.py.
POLICIES = (
    NONE,
    RANDOM,
    "streaming:budget={budget},sinks=4,every=32",
    "stride:step={step},recent=128,rows=16",
    "lru:budget={budget},recent=128,every=32",
    "h2o:budget={budget},recent=128,every=32",
    "snapkv:budget={budget},window=128,pool=7,every=32",
    "compactor:budget={budget},recent=128,chunk=128,every=32",
    "kvzip:budget={ahead},every=32",
    "triattention:budget={budget},recent=128,every=32,pinned=0",
)
BUDGETS = (0.5, 0.25)
CACHES = (EXACT, "int8", "int4", "int4:rotated:recent=128")
_SINKS, _RECENT = 4, 128
# Positions in addition to a passage's, for the second reading of `kvzip`.
_ROOM = 640


@dataclass(frozen=True)
class Figures(Prediction):
    """How one policy predicts the passages' continuations.

    Args:
        policy: As the requests named it.
        budget: Share of the prompt's rows that stay, 1.0 without compression.
        cache: Format of keys and values.
    """

    policy: str
    budget: float
    cache: str

    @property
    def name(self) -> str:
        """Of the policy."""
        return self.policy.partition(":")[0]

    def cells(self) -> str:
        """The figures as Markdown."""
        return f"{self.perplexity:.2f} | {self.divergence:.4f} | {self.same:.0%}"


@dataclass(frozen=True)
class Bench:
    """What is the same for all engines.

    Args:
        model: Hugging Face directory.
        texts: passages, all of one length.
        threads: of engines.
        calibration: text for policies that look at one.
    """

    model: Path
    texts: Sequence[Passage]
    threads: int
    calibration: Path = CALIBRATION

    def logits(self, policy: str, budgets: Sequence[float], cache: str) -> Iterator[list[Logits]]:
        """Logits before the tokens of each continuation, by budget.

        Args:
            policy: `none`, `random`, or a policy of llmc with placeholders for the budget.
            budgets: Shares of the prompt's rows that stay, the largest one first.
            cache: Format of keys and values, as `--kv-cache` names it.

        Raises:
            OptionError: If llmc refuses the policy for this model or cache, or if it drops no row.
        """
        length = len(self.texts[0].prompt)
        if policy == RANDOM:
            pairs = [(text.prompt, text.continuation) for text in self.texts]
            for budget in budgets:
                found = logits_by(RANDOM, self.model, pairs, rows_of(budget, length), recent=_RECENT, sinks=_SINKS)
                yield [logits.numpy() for logits in found]
            return
        longest = length + len(self.texts[0].continuation) + _ROOM
        options = {"dtype": "float32", "kv_cache": cache, "max_model_len": longest, "max_sequences": len(self.texts)}
        if policy != NONE:
            options |= {
                "kv_compression": with_budget(policy, budgets[0], length),
                "calibration": str(self.calibration),
            }
        with tempfile.TemporaryDirectory(prefix="llmc-bench-") as folder:
            path = Path(folder) / "engine.llmc"
            build(self.model, path, "cpu", options)
            with llmc.load(path, threads=self.threads) as engine:
                for budget in budgets:
                    yield _compressed(engine, self.texts, with_budget(policy, budget, length))


def main() -> None:
    """Measure, and print the table."""
    given = parse_arguments()
    found = recorded(given.records) if given.records else _measured(given)
    print("\n".join(table(found)))


def recorded(files: Sequence[Path]) -> list[Figures]:
    """The figures of runs that wrote them with --json."""
    return [Figures(**row) for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def table(found: Sequence[Figures]) -> Iterator[str]:
    """One line for each policy and cache format, as Markdown. Without compression it is the same for all budgets."""
    budgets = sorted({each.budget for each in found if each.name != NONE}, reverse=True) or [1.0]
    heads = (f"{budget:.0%} of the rows: perplexity | KL | same first choice" for budget in budgets)
    yield f"| policy | cache | {' | '.join(heads)} |"
    yield f"|---|---|{'--:|' * 3 * len(budgets)}"
    for name, cache in dict.fromkeys((each.name, each.cache) for each in found):
        cells = {each.budget: each.cells() for each in found if (each.name, each.cache) == (name, cache)}
        shown = (cells.get(1.0 if name == NONE else budget, " | | ") for budget in budgets)
        yield f"| `{name}` | {cache} | {' | '.join(shown)} |"


def measured(bench: Bench, policy: str, budgets: Sequence[float], cache: str, expected: list[Logits]) -> list[Figures]:
    """The figures of one policy by budget, with the logits of the engine that keeps and rounds nothing beside them."""
    length = len(bench.texts[0].prompt)
    by_budget = iter([expected]) if (policy, cache) == (NONE, EXACT) else bench.logits(policy, budgets, cache)
    return [
        Figures(
            **asdict(prediction(bench.texts, found, expected)),
            policy=with_budget(policy, budget, length),
            budget=budget,
            cache=cache,
        )
        for budget, found in zip(budgets, by_budget, strict=True)
    ]


def _compressed(engine: llmc.Engine, texts: Sequence[Passage], policy: str) -> list[Logits]:
    """What the engine predicts under a policy, which must drop rows unless it is `none`."""
    before = _dropped(engine)
    found = forced_logits(engine, texts, policy)
    if policy != NONE and _dropped(engine) == before:
        raise OptionError(
            f"{policy} drops nothing of prompts of {len(texts[0].prompt)} tokens",
            at="--length",
            fix="choose a smaller budget, or longer prompts",
        )
    return found


def _dropped(engine: llmc.Engine) -> int:
    """Rows that cuts have dropped."""
    return sum(group.stats.dropped for group in engine.loop.groups)


def _measured(given: argparse.Namespace) -> list[Figures]:
    """Measure each policy in each cache format, and print its figures, or the error of a policy that is refused."""
    console, found = Console(stderr=True), list[Figures]()
    given.cache.mkdir(parents=True, exist_ok=True)
    model = numbers_of(fetched(MODELS[given.model], given.cache), given.cache)
    texts = passages(model / "tokenizer.json", TEXT, given.texts, given.length, given.tokens)
    bench = Bench(model, texts, given.threads)
    cases = [
        (policy, cache) for cache in given.caches for policy in given.policies if policy != RANDOM or cache == EXACT
    ]
    expected = next(bench.logits(NONE, (1.0,), EXACT))
    for policy, cache in track(cases, given.model, console=console):
        budgets = (1.0,) if policy == NONE else sorted(given.budgets, reverse=True)
        try:
            rows = measured(bench, policy, budgets, cache, expected)
        except OptionError as error:
            console.print(f"{policy}, {cache}: {error.problem}", markup=False, soft_wrap=True)
            continue
        for row in rows:
            console.print(f"{row.policy}, {cache}: {row.cells()}", markup=False, soft_wrap=True)
        found += rows
        if given.json is not None:
            _record(given, found)
    return found


def _record(given: argparse.Namespace, found: Sequence[Figures]) -> None:
    about: Mapping[str, object] = {
        "machine": machine(given.threads),
        "date": date.today().isoformat(),
        "model": given.model,
        "texts": given.texts,
        "length": given.length,
        "tokens": given.tokens,
        "rows": [asdict(each) for each in found],
    }
    given.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["smollm2", "gemma3"], default="smollm2")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--caches", nargs="+", default=CACHES)
    parser.add_argument("--texts", type=int, default=4, help="number of passages")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt, a multiple of 16")
    parser.add_argument("--tokens", type=int, default=128, help="that are forced after a prompt")
    parser.add_argument("--cache", type=Path, default=Path("examples/out/real-models"), help="of fetched models")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--records", type=Path, nargs="+", help="show what these files of --json hold; measure nothing")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
