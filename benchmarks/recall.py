"""What KV compression forgets: recall of random strings by policy, budget, cache format and depth.

    python -m benchmarks.recall --json results.json --plot docs/kv-recall.png
    python -m benchmarks.recall --policies none "snapkv:budget={budget},window=16,pool=7" --length 1024

The model (examples/train_recall.py) copies: a prompt is a haystack of different random tokens and the beginning of one
piece of it, and the answer is the rest of the piece. Depth says where in the haystack the piece lies. An answer is
wrong if the rows of its piece are gone. Perplexity hides that, because it hardly depends on far tokens. Each policy is
built into an engine for this CPU. `random`, the baseline, keeps random rows: it runs in transformers, with a mask.
--model names another model, which must copy too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from rich.console import Console

import llmc
from benchmarks.llama_1b import machine
from benchmarks.quality import build
from llmc.runtime.threads import available_cores

MODEL = Path(__file__).parent.parent / "examples" / "models" / "recall"
NONE, RANDOM = "none", "random"
# A policy with the budget's number of rows, and for `stride` the distance of the rows that stay.
POLICIES = (
    NONE,
    RANDOM,
    "streaming:budget={budget},sinks=4,every=16",
    "stride:step={step},recent=64,rows=16",
    "h2o:budget={budget},recent=32,every=16",
    "snapkv:budget={budget},window=16,pool=7,every=16",
)
BUDGETS = (0.75, 0.5, 0.25, 0.125)
BLOCK = 16
# Tokens of a piece that the prompt gives, and those that are to be recalled.
GIVEN, RECALLED = 8, 4
_SPECIAL = 3


@dataclass(frozen=True)
class Recall:
    """Shares of tokens that one policy recalls.

    Args:
        policy: As it was built; its name is what stands before the colon.
        budget: Share of the prompt's rows that stay, 1.0 without compression.
        cache: Format of keys and values.
        by_depth: From the haystack's beginning to its end.
    """

    policy: str
    budget: float
    cache: str
    by_depth: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over all depths."""
        return sum(self.by_depth) / len(self.by_depth)


@dataclass(frozen=True)
class Task:
    """Prompts by depth, and what each is to be answered with."""

    prompts: tuple[tuple[tuple[int, ...], ...], ...]
    answers: tuple[tuple[tuple[int, ...], ...], ...]


def main() -> None:
    """Measure, and print the tables as they stand in docs/kv-compression.md."""
    given = parse_arguments()
    task = needles(given.length, given.depths, given.prompts, vocabulary(given.model))
    found: list[Recall] = []
    console = Console(stderr=True)
    for policy, budget, cache in cases(given):
        found.append(recall(given, policy, budget, cache, task))
        console.print(f"{policy}, {cache}: {found[-1].mean:.1%}", markup=False, highlight=False)
    print("\n".join((*table(found), "", *depths(found))))
    if given.json is not None:
        about = {"machine": machine(given.threads), "date": date.today().isoformat(), "length": given.length}
        given.json.write_text(json.dumps(about | {"rows": [asdict(each) for each in found]}, indent=1) + "\n")
    if given.plot is not None:
        plot(found, given.plot)


def cases(given: argparse.Namespace) -> Iterator[tuple[str, float, str]]:
    """Every policy at every budget in every cache format; no compression once in each."""
    for cache in given.caches:
        for policy in given.policies:
            for budget in (1.0,) if policy == NONE else given.budgets:
                if policy != RANDOM or cache == "auto":
                    yield policy, budget, cache


def needles(length: int, depths: int, prompts: int, size: int) -> Task:
    """Haystacks of so many tokens, each with one piece that is asked for."""
    chance = torch.Generator().manual_seed(0)
    asked: list[tuple[tuple[int, ...], ...]] = []
    wanted: list[tuple[tuple[int, ...], ...]] = []
    last = length - GIVEN - RECALLED
    for depth in range(depths):
        first = round(depth * last / max(depths - 1, 1))
        hay = [(_SPECIAL + torch.randperm(size - _SPECIAL, generator=chance)[:length]).tolist() for _ in range(prompts)]
        asked.append(tuple((*row, *row[first : first + GIVEN]) for row in hay))
        wanted.append(tuple(tuple(row[first + GIVEN : first + GIVEN + RECALLED]) for row in hay))
    return Task(tuple(asked), tuple(wanted))


def recall(given: argparse.Namespace, policy: str, budget: float, cache: str, task: Task) -> Recall:
    """One row of the table."""
    rows = max(BLOCK, round(budget * given.length / BLOCK) * BLOCK)
    text = policy.format(budget=rows, step=round(1 / budget))
    if policy == RANDOM:
        shares = kept_by_chance(given.model, task, rows)
        return Recall(text, budget, cache, shares)
    options = {"dtype": "float32", "kv_cache": cache, "max_model_len": given.length + 64, "max_sequences": 16}
    with tempfile.TemporaryDirectory(prefix="llmc-bench-") as folder:
        path = Path(folder) / "engine.llmc"
        build(given.model, path, "cpu", options | ({} if policy == NONE else {"kv_compression": text}))
        with llmc.load(path, threads=given.threads) as engine:
            drawn = llmc.SamplingParams(max_tokens=RECALLED, temperature=0.0, ignore_eos=True)
            by_depth = list[float]()
            for prompts, answers in zip(task.prompts, task.answers, strict=True):
                said = engine.generate([list(prompt) for prompt in prompts], drawn)
                by_depth.append(share([answer.choices[0].token_ids for answer in said], answers))
    return Recall(text, budget, cache, tuple(by_depth))


def share(said: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> float:
    """Of tokens that are as wanted."""
    pairs = [pair for row, expected in zip(said, wanted, strict=True) for pair in zip(row, expected, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


@torch.inference_mode()
def kept_by_chance(path: Path, task: Task, rows: int) -> tuple[float, ...]:
    """With the last GIVEN rows and others by chance, the same for all layers, hidden once the prompt has been read."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    chance = torch.Generator().manual_seed(1)
    shares = []
    for prompts, answers in zip(task.prompts, task.answers, strict=True):
        said = []
        for prompt, answer in zip(prompts, answers, strict=True):
            # The answer's tokens but the last follow the prompt: what is said of each is compared.
            ids = torch.tensor([[*prompt, *answer[:-1]]])
            count = len(prompt)
            kept = torch.zeros(ids.shape[1], dtype=torch.bool)
            kept[torch.randperm(count - GIVEN, generator=chance)[: rows - GIVEN]] = True
            kept[count - GIVEN :] = True
            visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            visible[count:] &= kept
            mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
            logits = model(ids, attention_mask=mask[None, None]).logits[0]
            said.append(logits[count - 1 :].argmax(-1).tolist())
        shares.append(share(said, answers))
    return tuple(shares)


def vocabulary(model: Path) -> int:
    """Number of tokens that haystacks are drawn from."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def table(found: Sequence[Recall]) -> Iterator[str]:
    """Recall by policy and budget."""
    budgets = sorted({each.budget for each in found}, reverse=True)
    yield f"| policy | cache | {' | '.join(f'{budget:.1%} of the rows' for budget in budgets)} |"
    yield f"|---|---|{'--:|' * len(budgets)}"
    for name, cache in dict.fromkeys((each.policy.partition(":")[0], each.cache) for each in found):
        of_name = {r.budget: r.mean for r in found if (r.policy.partition(":")[0], r.cache) == (name, cache)}
        yield f"| `{name}` | {cache} | {' | '.join(f'{of_name[b]:.0%}' if b in of_name else '' for b in budgets)} |"


def depths(found: Sequence[Recall]) -> Iterator[str]:
    """Recall by depth at half of the rows, without codes."""
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

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    plain = [each for each in found if each.cache == "auto"]
    for name in dict.fromkeys(each.policy.partition(":")[0] for each in plain if each.budget < 1):
        points = sorted((each.budget, each.mean) for each in plain if each.policy.partition(":")[0] == name)
        left.plot(*zip(*points, strict=True), marker="o", label=name)
    left.set(xlabel="share of the rows that stay", ylabel="tokens recalled", ylim=(-0.02, 1.02))
    left.legend()
    half = [each for each in plain if each.budget == 0.5]
    right.imshow([each.by_depth for each in half], aspect="auto", vmin=0, vmax=1, cmap="viridis", extent=(0, 1, 0, 1))
    places = [1 - (row + 0.5) / len(half) for row in range(len(half))]
    right.set_yticks(places, [each.policy.partition(":")[0] for each in half])
    right.set(xlabel="depth of what is recalled, 50% of the rows stay")
    figure.savefig(file, dpi=110)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--caches", nargs="+", default=("auto", "int8", "int4"))
    parser.add_argument("--length", type=int, default=512, help="tokens of a haystack")
    parser.add_argument("--depths", type=int, default=11)
    parser.add_argument("--prompts", type=int, default=16, help="of each depth")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
