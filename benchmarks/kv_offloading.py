"""A prompt that comes back after its blocks fell out of the KV cache: what it costs with a second tier.

    python -m benchmarks.kv_offloading --engine ENGINE --tokens 8000
    python -m benchmarks.kv_offloading --engine ENGINE --dir /mnt/ssd    # blocks in files of that disk

Without an engine the shipped model is built. The cache has room for one sequence of the longest length. Each round has
three runs, in this order: a prompt of random tokens that nobody has seen (cold); the same prompt again, whose blocks
are in the cache (cached); and, after other prompts have taken the cache, the same prompt once more, whose blocks come
from the tier (swapped). A run is the prompt and one token. The goal is swapped ≤ 10% of cold. The copy of the blocks'
bytes within memory, measured in the same run, is the limit of what bringing them back can take.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import llmc
from benchmarks.llama_1b import machine
from benchmarks.measure import ROUNDS, Sample
from llmc.runtime.threads import available_cores

MODEL = Path(__file__).parent.parent / "examples" / "models" / "bard-6m"
GOAL = 0.1


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="llmc-bench-") as folder:
        engine = arguments.engine
        if engine is None:
            engine = Path(folder) / "bard-6m.llmc"
            llmc.build(MODEL, engine)
        record = measure(engine, arguments)
    Console().print(table(record))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure(path: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """All rounds, after one that is not counted."""
    with llmc.load(path) as engine:
        limits, program = engine.limits, engine.manifest
        blocks = limits.blocks_for(limits.max_model_len)
        block_bytes = sum(llmc_block_bytes(engine))
    tokens = min(arguments.tokens or limits.max_model_len - 1, limits.max_model_len - 1)
    options = {"kv_cache_bytes": blocks * block_bytes, "threads": arguments.threads}
    seconds: dict[str, list[float]] = {"cold": [], "cached": [], "swapped": []}
    chooser = random.Random(0)
    with llmc.load(path, kv_offloading_size=arguments.size, kv_offloading_dir=arguments.dir, **options) as engine:
        tier = engine.loop.scheduler.second_tier
        assert tier is not None

        def prompt() -> list[int]:
            return [chooser.randrange(engine.info.vocab_size) for _ in range(tokens)]

        for round_number in range(arguments.rounds + 1):
            asked, found = prompt(), {}
            found["cold"] = run(engine, asked)
            found["cached"] = run(engine, asked)
            for _ in range(2 * -(-limits.max_model_len // tokens)):  # As many as fill the cache, and as many again.
                run(engine, prompt())
            before = tier.stats
            found["swapped"] = run(engine, asked)
            came = tier.stats.loaded_blocks - before.loaded_blocks
            expected = (tokens - 1) // limits.block_size
            assert came == expected, f"{came} of {expected} blocks came from the tier: give it more room (--size)"
            if round_number:
                for name, value in found.items():
                    seconds[name].append(value)
    samples = {name: Sample(tuple(values)) for name, values in seconds.items()}
    return {
        "machine": machine(arguments.threads),
        "model": program.model.name,
        "tokens": tokens,
        "blocks": expected,
        "bytes": expected * block_bytes,
        "copy_seconds": copy_seconds(expected * block_bytes),
        "seconds": seconds,
        "swapped_to_cold": samples["swapped"].paired_ratio(samples["cold"]),
        "cached_to_cold": samples["cached"].paired_ratio(samples["cold"]),
    }


def llmc_block_bytes(engine: llmc.Engine) -> Sequence[int]:
    """Bytes of a block in each group of caches."""
    from llmc.engine_format.reader import read_engine

    return read_engine(engine.path, check_weights=False).program.block_bytes()


def run(engine: llmc.Engine, prompt: list[int]) -> float:
    """Seconds of the prompt and a token."""
    begin = time.perf_counter()
    engine.generate([prompt], max_tokens=1, ignore_eos=True)
    return time.perf_counter() - begin


def copy_seconds(nbytes: int) -> float:
    """Time to copy this many bytes in memory: the best of five runs."""
    source, found = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        np.copyto(found, source)
        times.append(time.perf_counter() - begin)
    return min(times)


def table(record: dict[str, object]) -> Table:
    """The record for people."""
    seconds = record["seconds"]
    assert isinstance(seconds, dict)
    found = Table(
        title=f"{record['model']}, a prompt of {record['tokens']} tokens, on {record['machine']}",
        caption=f"swapped / cold: {record['swapped_to_cold']:.3f} (goal: at most {GOAL}); {record['blocks']} blocks of "
        f"{record['bytes']} bytes in total, which a copy in memory takes {record['copy_seconds']:.4f} s for",
    )
    for title in ("run", "median s", "spread"):
        found.add_column(title)
    for name, values in seconds.items():
        sample = Sample(tuple(values))
        found.add_row(name, f"{sample.median:.4f}", f"{sample.spread:.0%}")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, help="default: the shipped model's, built for this machine")
    parser.add_argument("--tokens", type=int, help="of the prompt; default: the engine's longest sequence")
    parser.add_argument("--size", default="8GB", help="of the second tier")
    parser.add_argument("--dir", type=Path, help="of its files; default: those of llmc's cache")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path, help="write the record there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
