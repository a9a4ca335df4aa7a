"""What KV compression forgets: recall by policy, budget, cache format and depth.

    python -m benchmarks.recall --json copies.json
    python -m benchmarks.recall --task repeats --caches auto --json repeats.json
    python -m benchmarks.recall --model smollm2 --length 1024 --caches auto int8 --json needles.json
    python -m benchmarks.recall --policies none "snapkv:budget={budget},window=16,pool=7" --length 1024
    python -m benchmarks.recall --records copies.json other.json --plot docs/kv-recall.png

Two models copy random tokens: `copying` is the shipped one, which is trained (train_copying_model.py), and `computed`
has computed weights (copying_model.py). `smollm2` is SmolLM2 135M and `gemma3` is Gemma 3 270M, which find a number in
prose. Depth says where in the haystack the answer is. Each policy is built into an engine for this CPU. `random`, the
baseline, and choices that llmc does not have run in transformers with masks (recall_masks.py).
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
from benchmarks.recall_tasks import Task, copies, haystack, needles, repeats
from llmc.errors import BuildWarning, OptionError
from llmc.runtime.threads import available_cores

_EXAMPLES = Path(__file__).parent.parent / "examples"
TEXT, CALIBRATION = _EXAMPLES / "data" / "heldout.txt", _EXAMPLES / "data" / "calibration.txt"
COPYING = _EXAMPLES / "models" / "copying"
TASKS = {"copies": copies, "repeats": repeats}
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
        task: Name of the task.
    """

    policy: str
    budget: float
    cache: str
    by_depth: tuple[float, ...]
    task: str = "copies"

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
    for task in dict.fromkeys(each.task for each in found):
        of_task = [each for each in found if each.task == task]
        print("\n".join((f"{task}:", "", *table(of_task), "", *depths(of_task), "")))
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
        return Recall(text, budget, cache, tuple(map(task.share, recalled, task.answers)), task.name)
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
                by_depth.append(task.share([answer.choices[0].token_ids for answer in said], answers))
            if policy != NONE and not any(group.stats.dropped for group in engine.loop.groups):
                raise OptionError(
                    f"{text} drops nothing of prompts of {length} tokens",
                    at="--length",
                    fix=f"choose a multiple of {_BLOCK}: rows are dropped where a block ends",
                )
    return Recall(text, budget, cache, tuple(by_depth), task.name)


def rows_of(budget: float, length: int) -> int:
    """A share of the rows of a prompt with `length` tokens, in whole blocks."""
    return max(_BLOCK, round(budget * length / _BLOCK) * _BLOCK)


def with_budget(policy: str, budget: float, length: int) -> str:
    """A policy's text with numbers for `{budget}`, `{step}` and `{ahead}`, for prompts of `length` tokens."""
    rows = rows_of(budget, length)
    return policy.format(budget=rows, step=round(1 / budget), ahead=rows - 2 * _BLOCK)


def recorded(files: Sequence[Path]) -> list[Recall]:
    """The figures of runs that wrote them with --json."""
    found = list[Recall]()
    for file in files:
        record = json.loads(file.read_text())
        # Older records name no task. Each kind of model had one then.
        task = "needles" if record.get("model") in MODELS else "copies"
        found += [Recall(**{"task": task, **row, "by_depth": tuple(row["by_depth"])}) for row in record["rows"]]
    return found


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
    """Draw recall by budget, and a heat map by depth at half of the rows, for each task.

    Raises:
        OptionError: If matplotlib is missing.
    """
    from llmc.bench.plot import require_plot_extra

    require_plot_extra()
    from matplotlib.figure import Figure

    plain = [each for each in found if each.cache == "auto" and each.policy != NONE]
    tasks = list(dict.fromkeys(each.task for each in plain))
    figure = Figure(figsize=(11, 0.6 + 4.4 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 2, squeeze=False)
    # A policy has one colour and line in all panels. The eye tells fewer colours apart: each comes with two lines.
    names = list(dict.fromkeys(each.name for each in sorted(plain, key=lambda each: -each.mean)))
    for task, (left, right) in zip(tasks, panels, strict=True):
        of_task = [each for each in plain if each.task == task]
        for place, name in enumerate(names):
            points = sorted((each.budget, each.mean) for each in of_task if each.name == name)
            line, marker = ("-", ":")[place % 2], "ov"[place % 2]
            left.plot(*zip(*points, strict=True), f"C{place // 2}", ls=line, marker=marker, label=name)
        left.set(title=task, xlabel="share of the rows that stay", ylabel="tokens recalled", ylim=(-0.02, 1.02))
        half = sorted((each for each in of_task if each.budget == 0.5), key=lambda each: -each.mean)
        image = right.imshow([each.by_depth for each in half], aspect="auto", vmin=0, vmax=1, extent=(0, 1, 0, 1))
        places = [1 - (row + 0.5) / len(half) for row in range(len(half))]
        right.set_yticks(places, [each.name for each in half])
        right.set(title=task, xlabel="depth of the answer, 50% of the rows stay")
        figure.colorbar(image, label="tokens recalled")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=110)


def _measured(given: argparse.Namespace) -> list[Recall]:
    """Measure each case, and print its recall, or the error of a policy that the model does not support."""
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
    if given.model in ("copying", "computed"):
        model = COPYING if given.model == "copying" else folder / "computed"
        if given.model == "computed":
            save_copying_model(model)
        vocabulary: int = json.loads((model / "config.json").read_text())["vocab_size"]
        task = TASKS[given.task](given.length, given.depths, given.prompts, vocabulary)
        return model, task, haystack(folder / "haystack.json", vocabulary)
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
    parser.add_argument("--model", choices=["copying", "computed", "smollm2", "gemma3"], default="copying")
    parser.add_argument("--task", choices=TASKS, default="copies", help="of the models that copy")
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
