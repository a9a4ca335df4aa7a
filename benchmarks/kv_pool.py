"""How many long requests run at once in the same memory, with and without KV compression; and that each gets the tokens
that it gets alone.

    python -m benchmarks.kv_pool
    python -m benchmarks.kv_pool --compression h2o:budget=256,every=16 --requests 50 --json pool.json

The model is copying_model.py's. The pool has room for --fit requests of full length. What is counted does not depend on
the machine's speed: requests that hold blocks, after each step while others wait.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import llmc
from benchmarks.copying_model import VOCABULARY, save_copying_model
from benchmarks.quality import build
from llmc.errors import BuildWarning
from llmc.runtime.engine import Engine
from llmc.runtime.scheduling.step_plan import StepPlan
from llmc.runtime.threads import available_cores

_BLOCK = 16
# Of a token: keys and values of two layers, two heads of 64 channels each, in fp32.
_ROW_BYTES = 2 * 2 * 2 * 64 * 4


@dataclass(frozen=True)
class Together:
    """What one engine held.

    Args:
        compression: The policy, or none.
        mean: Requests that ran, in the mean over steps while others waited.
        most: The largest number.
        preemptions: How often a request gave way.
        as_alone: Answers with the tokens that the request gets alone.
        requests: Number of requests.
    """

    compression: str
    mean: float
    most: int
    preemptions: int
    as_alone: int
    requests: int


def main() -> None:
    """Measure without compression and with it, and print the table."""
    given = parse_arguments()
    found = list(measured(given))
    plain, compressed = found
    print("| KV cache | requests at once, mean | most | preemptions | answers as alone |")
    print("|---|--:|--:|--:|--:|")
    for each in found:
        figures = f"{each.mean:.1f} | {each.most} | {each.preemptions} | {each.as_alone} of {each.requests}"
        print(f"| `{each.compression}` | {figures} |")
    print(f"\n{compressed.mean / plain.mean:.2f}x as many at once")
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": [asdict(each) for each in found]}, indent=1) + "\n")


def measured(given: argparse.Namespace) -> Iterator[Together]:
    """Of the plain engine, then of the compressed one."""
    chance = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, (given.requests, given.prompt), generator=chance).tolist()
    length = given.prompt + given.answer
    with tempfile.TemporaryDirectory(prefix="llmc-bench-") as folder:
        model = Path(folder) / "copying"
        save_copying_model(model)
        for compression in ("none", given.compression):
            path = Path(folder) / f"{compression.partition(':')[0]}.llmc"
            options = {"dtype": "float32", "max_model_len": length + _BLOCK, "max_sequences": given.requests}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*weights hold nothing but zeros", BuildWarning)
                build(model, path, "cpu", options | ({} if compression == "none" else {"kv_compression": compression}))
            yield _together(path, compression, prompts, given)


def _together(path: Path, compression: str, prompts: list[list[int]], given: argparse.Namespace) -> Together:
    greedy = llmc.SamplingParams(max_tokens=given.answer, temperature=0.0, ignore_eos=True)
    memory = given.fit * (given.prompt + given.answer) * _ROW_BYTES
    with llmc.load(path, threads=given.threads, prefix_cache=False) as engine:
        alone = [engine.generate([prompt], greedy)[0].choices[0].token_ids for prompt in prompts]
    with llmc.load(path, threads=given.threads, prefix_cache=False, kv_cache_bytes=memory) as engine:
        running = _counted(engine)
        answers = [each.choices[0].token_ids for each in engine.generate(prompts, greedy)]
        preemptions = engine.loop.scheduler.preemptions
    equal = sum(found == expected for found, expected in zip(answers, alone, strict=True))
    return Together(compression, sum(running) / len(running), max(running), preemptions, equal, len(prompts))


def _counted(engine: Engine) -> list[int]:
    """The number of requests that hold blocks after each step from now on, while others wait."""
    loop, step, found = engine.loop, engine.loop.step, list[int]()

    def counted() -> StepPlan:
        plan = step()
        if loop.scheduler.waiting:
            found.append(loop.scheduler.running)
        return plan

    loop.step = counted  # type: ignore[method-assign]
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default="snapkv:share=50,window=16,every=16")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--fit", type=int, default=12, help="requests of full length that the pool has room for")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
