"""A text that is longer than the cache: step time and memory of `streaming` while it grows.

    python -m benchmarks.streaming --json streaming.json
    python -m benchmarks.streaming --model smollm2 --tokens 20000

One request generates `--tokens` tokens in a cache of `--slots` rows. A step is the time from one token to the next. The
table has the median and the largest step for each `--interval` tokens, and the memory of the process at their end. Both
should stay flat: the last row's median within 10% of the second's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import llmc
from benchmarks.llama_1b import machine
from benchmarks.quality import build
from benchmarks.real_model_files import MODELS, fetched, numbers_of
from llmc.runtime.threads import available_cores

SHIPPED = Path(__file__).parent.parent / "examples" / "models" / "bard-6m"
GOAL = 1.1
_BLOCK, _EVERY = 16, 128


@dataclass(frozen=True)
class Interval:
    """Consecutive tokens of the text.

    Args:
        end: Number of tokens that the request has at their end.
        median: Seconds of a step.
        slowest: Seconds of the slowest step, which cuts the table.
        resident: Bytes of the process in memory at their end.
        used: Blocks that the request holds at their end.
    """

    end: int
    median: float
    slowest: float
    resident: int
    used: int


def main() -> None:
    """Measure, and print the table as it stands in docs/kv-compression.md."""
    given = parse_arguments()
    policy = f"streaming:budget={given.slots - _EVERY},sinks=4,every={_EVERY}"
    with tempfile.TemporaryDirectory(prefix="llmc-bench-") as folder:
        path = Path(folder) / "engine.llmc"
        longest = given.tokens + _BLOCK
        options = {"kv_compression": policy, "max_model_len": longest, "max_sequences": 1, "block_size": _BLOCK}
        build(_model(given), path, "cpu", {**options, "max_batch_tokens": 512})
        found = measure(path, given.tokens, given.interval, given.threads)
    print("\n".join(table(found)))
    ratio = found[-1].median / found[1].median
    print(f"\nlast / second: {ratio:.3f} (goal: at most {GOAL})")
    if given.json is not None:
        about = {"machine": machine(given.threads), "date": date.today().isoformat(), "model": given.model}
        about |= {"policy": policy, "slots": given.slots, "last_to_second": ratio}
        given.json.write_text(json.dumps(about | {"rows": [asdict(each) for each in found]}, indent=1) + "\n")


def measure(path: Path, tokens: int, interval: int, threads: int) -> list[Interval]:
    """The intervals of a text that begins with one token.

    Args:
        path: An engine that was built for `streaming`.
        tokens: Number of tokens of the text, a multiple of `interval`.
        interval: Number of tokens of an interval.
        threads: Of the engine.
    """
    found, seconds = list[Interval](), list[float]()
    with llmc.load(path, threads=threads) as engine:
        start = [engine.info.bos_token_id or 0]
        pool, before = engine.loop.groups[0].pool, time.perf_counter()
        for number, _ in enumerate(engine.stream(start, max_tokens=tokens, ignore_eos=True, temperature=0.0), 2):
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
            if number % interval == 0:
                found.append(Interval(number, statistics.median(seconds), max(seconds), resident_bytes(), pool.used))
                seconds.clear()
    return found


def resident_bytes() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def table(found: Sequence[Interval]) -> Iterator[str]:
    """The intervals, as Markdown."""
    yield "| tokens | median step | slowest step | memory of the process | blocks |"
    yield "|--:|--:|--:|--:|--:|"
    for each in found:
        times = f"{1e3 * each.median:.2f} ms | {1e3 * each.slowest:.1f} ms"
        yield f"| {each.end:,} | {times} | {each.resident / 2**20:.0f} MiB | {each.used} |"


def _model(given: argparse.Namespace) -> Path:
    if given.model == "bard-6m":
        return SHIPPED
    given.cache.mkdir(parents=True, exist_ok=True)
    return numbers_of(fetched(MODELS[given.model], given.cache), given.cache)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["bard-6m", "smollm2"], default="bard-6m")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text")
    parser.add_argument("--slots", type=int, default=512, help="rows of the cache, a multiple of 16")
    parser.add_argument("--interval", type=int, default=2_000, help="tokens of a row of the table")
    parser.add_argument("--cache", type=Path, default=Path("examples/out/real-models"), help="of fetched models")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
