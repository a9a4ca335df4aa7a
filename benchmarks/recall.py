"""What KV compression forgets: recall by policy, budget, cache format and depth.

    python -m benchmarks.recall --json copies.json
    python -m benchmarks.recall --model smollm2 --length 1024 --caches auto int8 --json needles.json
    python -m benchmarks.recall --policies none "snapkv:budget={budget},window=16,pool=7" --length 1024
    python -m benchmarks.recall --records copies.json other.json --plot docs/images/kv-recall.png

`copying` is a model whose weights are computed (copying_model.py): it copies random tokens. `smollm2` is SmolLM2 135M
and `gemma3` is Gemma 3 270M, which find a number in prose. Depth says where in the haystack the answer is. Each policy
is built into an engine for this CPU. `random`, the baseline, and choices that llmc does not have run in transformers
with masks (recall_masks.py).
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rich.console import Console

import llmc
from benchmarks.copying_model import save_copying_model
from benchmarks.llama_1b import machine
from benchmarks.quality import build
from benchmarks.real_model_files import MODELS, fetched, numbers_of
from benchmarks.recall_masks import CHOICES, recalled_by
from benchmarks.recall_tasks import Task, copies, haystack, needles
from llmc.errors import BuildWarning, OptionError
from llmc.runtime.threads import available_cores

_DATA = Path(__file__).parent.parent / "examples" / "data"
TEXT, CALIBRATION = _DATA / "heldout.txt", _DATA / "calibration.txt"
NONE = "none"
# A policy with the budget's number of rows, for `stride` the distance of the rows that stay, and for `kvzip` the number
# of rows without the last two blocks of the prompt, which stay.
POLICIES = (
    NONE,
    *CHOICES,
    "streaming:budget={budget},sinks=4,every=16",
    "stride:step={step},recent=64,rows=16",
    "lru:budget={budget},recent=32,every=16",
    "h2o:budget={budget},recent=32,every=16",
    "snapkv:budget={budget},window=16,pool=7,every=16",
    "compactor:budget={budget},chunk=128,every=16",
    "kvzip:budget={ahead},every=16",
    "triattention:budget={budget},recent=32,every=16,pinned=0",
    "triattention:budget={budget},recent=32,every=16,pinned=0,heads=kv_head",
    "triattention:budget={budget},recent=32,every=16,pinned=0,heads=all",
)
BUDGETS = (0.75, 0.5, 0.25, 0.125)
_BLOCK = 16
# Positions in addition to a prompt's, for the answer and for the second reading of `kvzip`.
_ROOM = 640


@dataclass(frozen=True)
class Recall:
    """Shares of tokens that one policy recalls.

    Args:
        policy: As it was built; its name is the part before the colon.
        budget: Share of the prompt's rows that stay, 1.0 without compression.
        cache: Format of keys and values.
        by_depth: From the haystack's beginning to its end.
    """

    policy: str
    budget: float
    cache: str
    by_depth: tuple[float, ...]

    @property
    def name(self) -> str:
        """Of the policy, with the heads that choose rows together, if it says so."""
        name, _, options = self.policy.partition(":")
        return " ".join((name, *re.findall(r"heads=\w+", options)))

    @property
    def mean(self) -> float:
        """Over all depths."""
        return sum(self.by_depth) / len(self.by_depth)


def main() -> None:
    """Measure, and print the tables as they stand in docs/kv-compression.md."""
    given = parse_arguments()
    found = recorded(given.records) if given.records else _measured(given)
    print("\n".join((*table(found), "", *depths(found))))
    if given.json is not None:
        about = {"machine": machine(given.threads), "date": date.today().isoformat()}
        about |= {"model": given.model, "length": given.length, "prompts": given.prompts}
        given.json.write_text(json.dumps(about | {"rows": [asdict(each) for each in found]}, indent=1) + "\n")
    if given.plot is not None:
        plot(found, given.plot)


def recall(
    model: Path, task: Task, policy: str, budget: float, cache: str, threads: int, calibration: Path | None = None
) -> Recall:
    """The recall of one policy.

    Args:
        model: Hugging Face directory.
        task: What is asked.
        policy: With `{budget}`, `{step}` or `{ahead}`, or `none`, or one of CHOICES.
        budget: Share of a prompt's rows that stay.
        cache: Format of keys and values, as `--kv-cache` names it.
        threads: Of the engine.
        calibration: Text, or token ids, for policies that look at one.

    Raises:
        OptionError: If the policy drops no row of these prompts, whose recall would then say nothing.
    """
    length = min(len(prompt) for prompts in task.prompts for prompt in prompts)
    rows, text = rows_of(budget, length), with_budget(policy, budget, length)
    if policy in CHOICES:
        recalled = recalled_by(policy, model, task, rows)
        return Recall(text, budget, cache, tuple(map(_share, recalled, task.answers)))
    options = {"dtype": "float32", "kv_cache": cache, "max_model_len": task.longest + _ROOM, "max_sequences": 16}
    options |= {} if policy == NONE else {"kv_compression": text, "calibration": calibration}
    with tempfile.TemporaryDirectory(prefix="llmc-bench-") as folder:
        path = Path(folder) / "engine.llmc"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*weights hold nothing but zeros", BuildWarning)
            build(model, path, "cpu", options)
        with llmc.load(path, threads=threads) as engine:
            by_depth = list[float]()
            for prompts, answers in zip(task.prompts, task.answers, strict=True):
                most = max(map(len, answers))
                greedy = llmc.SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
                said = engine.generate([list(prompt) for prompt in prompts], greedy)
                by_depth.append(_share([answer.choices[0].token_ids for answer in said], answers))
            if policy != NONE and not any(group.stats.dropped for group in engine.loop.groups):
                raise OptionError(
                    f"{text} drops nothing of prompts of {length} tokens",
                    at="--length",
                    fix=f"choose a multiple of {_BLOCK}: rows are dropped where a block ends",
                )
    return Recall(text, budget, cache, tuple(by_depth))


def rows_of(budget: float, length: int) -> int:
    """A share of the rows of a prompt with `length` tokens, in whole blocks."""
    return max(_BLOCK, round(budget * length / _BLOCK) * _BLOCK)


def with_budget(policy: str, budget: float, length: int) -> str:
    """A policy's text with numbers for `{budget}`, `{step}` and `{ahead}`, for prompts of `length` tokens."""
    rows = rows_of(budget, length)
    return policy.format(budget=rows, step=round(1 / budget), ahead=rows - 2 * _BLOCK)


def recorded(files: Sequence[Path]) -> list[Recall]:
    """The figures of runs that wrote them with --json."""
    rows = (row for file in files for row in json.loads(file.read_text())["rows"])
    return [Recall(row["policy"], row["budget"], row["cache"], tuple(row["by_depth"])) for row in rows]


def table(found: Sequence[Recall]) -> Iterator[str]:
    """Recall by policy and budget, as Markdown."""
    budgets = sorted({each.budget for each in found}, reverse=True)
    yield f"| policy | cache | {' | '.join(f'{budget:.1%} of the rows' for budget in budgets)} |"
    yield f"|---|---|{'--:|' * len(budgets)}"
    for name, cache in dict.fromkeys((each.name, each.cache) for each in found):
        of_name = {r.budget: r.mean for r in found if (r.name, r.cache) == (name, cache)}
        yield f"| `{name}` | {cache} | {' | '.join(f'{of_name[b]:.0%}' if b in of_name else '' for b in budgets)} |"


def depths(found: Sequence[Recall]) -> Iterator[str]:
    """Recall by depth at half of the rows, without codes, as Markdown."""
    half = [each for each in found if each.budget in (0.5, 1.0) and each.cache == "auto"]
    if not half:
        return
    count = len(half[0].by_depth)
    yield f"| policy at 50% | {' | '.join(f'depth {at / max(count - 1, 1):.0%}' for at in range(count))} |"
    yield f"|---|{'--:|' * count}"
    for each in half:
        yield f"| `{each.policy}` | {' | '.join(f'{value:.0%}' for value in each.by_depth)} |"


def plot(found: Sequence[Recall], file: Path) -> None:
    """Recall by budget, and a heat map by depth at half of the rows. Raises OptionError without matplotlib."""
    from llmc.bench.plot import require_plot_extra

    require_plot_extra()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    plain = [each for each in found if each.cache == "auto" and each.policy != NONE]
    half = sorted((each for each in plain if each.budget == 0.5), key=lambda each: -each.mean)
    for place, name in enumerate(dict.fromkeys(each.name for each in (*half, *plain))):
        points = sorted((each.budget, each.mean) for each in plain if each.name == name)
        # More names than colours that the eye tells apart: each colour comes with two kinds of lines.
        left.plot(
            *zip(*points, strict=True), f"C{place // 2}", ls=("-", ":")[place % 2], marker="ov"[place % 2], label=name
        )
    left.set(xlabel="share of the rows that stay", ylabel="tokens recalled", ylim=(-0.02, 1.02))
    figure.legend(loc="outside lower center", ncols=5)
    image = right.imshow([each.by_depth for each in half], aspect="auto", vmin=0, vmax=1, extent=(0, 1, 0, 1))
    places = [1 - (row + 0.5) / len(half) for row in range(len(half))]
    right.set_yticks(places, [each.name for each in half])
    right.set(xlabel="depth of the answer, 50% of the rows stay")
    figure.colorbar(image, label="tokens recalled")
    figure.savefig(file, dpi=110)


def _share(said: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> float:
    """Of tokens that are as wanted."""
    rows = zip(said, wanted, strict=True)
    pairs = [pair for row, expected in rows for pair in zip(row, expected, strict=False)]
    return sum(one == other for one, other in pairs) / len(pairs)


def _measured(given: argparse.Namespace) -> list[Recall]:
    """All cases, each printed as it ends, or why there is no figure: some policies do not run on every model."""
    console, found = Console(stderr=True), list[Recall]()
    with tempfile.TemporaryDirectory(prefix="llmc-bench-") as folder:
        model, task, text = _model_and_task(given, Path(folder))
        for policy, budget, cache in _cases(given):
            try:
                found.append(recall(model, task, policy, budget, cache, given.threads, text))
            except OptionError as error:
                console.print(f"{policy} at {budget:.1%}, {cache}: {error.problem}", markup=False, soft_wrap=True)
                continue
            console.print(f"{policy} at {budget:.1%}, {cache}: {found[-1].mean:.1%}", markup=False, highlight=False)
    return found


def _model_and_task(given: argparse.Namespace, folder: Path) -> tuple[Path, Task, Path]:
    if given.model == "copying":
        model = folder / "copying"
        save_copying_model(model)
        return model, copies(given.length, given.depths, given.prompts), haystack(folder / "haystack.json")
    given.cache.mkdir(parents=True, exist_ok=True)
    model = numbers_of(fetched(MODELS[given.model], given.cache), given.cache)
    return model, needles(given.length, given.depths, given.prompts, model / "tokenizer.json", TEXT), CALIBRATION


def _cases(given: argparse.Namespace) -> Iterator[tuple[str, float, str]]:
    """Every policy at every budget in every cache format; no compression once in each."""
    for cache in given.caches:
        for policy in given.policies:
            for budget in (1.0,) if policy == NONE else given.budgets:
                drops_rows = "{step}" not in policy or round(1 / budget) > 1
                if drops_rows and (policy not in CHOICES or cache == "auto"):
                    yield policy, budget, cache


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["copying", "smollm2", "gemma3"], default="copying")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--caches", nargs="+", default=("auto", "int8", "int4"))
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt, a multiple of 16")
    parser.add_argument("--depths", type=int, default=11)
    parser.add_argument("--prompts", type=int, default=16, help="of each depth")
    parser.add_argument("--cache", type=Path, default=Path("examples/out/real-models"), help="of fetched models")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--records", type=Path, nargs="+", help="show what these files of --json hold; measure nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
