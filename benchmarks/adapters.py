"""What adapters beside the weights cost: decoding of 16 requests with 32 adapters, against the engine without any.

    python -m benchmarks.adapters
    python -m benchmarks.adapters examples/models/bard-6m --rank 64 --json results.json
    python -m benchmarks.adapters --shape llama-3.2-1b --steps 16 --rounds 2

Of one build without adapters and one with --enable-lora, in turn: the first; the second without an adapter in the
step, which ought to take as long; with one adapter for all requests; and with a different one for each, of 32 that
take turns in as many slots. The share of the first's speed is that of the same round.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import llmc
from benchmarks.measure import ROUNDS, alternate
from benchmarks.random_checkpoint import write_checkpoint
from llmc.runtime.engine import Engine
from llmc.runtime.requests.generation_request import GenerationRequest
from llmc.runtime.sampling.sampling_params import SamplingParams

MODEL = Path(__file__).parent.parent / "examples" / "models" / "bard-6m"
REQUESTS, CONTEXT = 16, 16
PLAIN, NONE, ONE, EACH = "without pools", "no adapter", "one adapter for all", "one adapter each"


def main() -> None:
    """Build, measure in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--shape", help="random weights of this shape in the place of a model (random_checkpoint.py)")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--quantize", default="")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmc-adapters-") as folder:
        place = Path(folder)
        model = write_checkpoint(given.shape, place / "model") if given.shape else given.model
        limits: dict[str, Any] = {
            "quantize": given.quantize,
            "max_model_len": 512,
            "max_sequences": REQUESTS,
            "max_batch_tokens": 512,
        }
        pools: dict[str, Any] = {"enable_lora": True, "max_loras": given.adapters, "max_lora_rank": given.rank}
        with (
            llmc.compile(model, output=place / "plain.llmc", **limits) as plain,
            llmc.compile(model, output=place / "pools.llmc", **limits, **pools) as adapted,
        ):
            names = [f"adapter{index}" for index in range(given.adapters)]
            for index, name in enumerate(names):
                adapted.load_adapter(name, write_adapter(adapted, place / name, given.rank, index))
            turns = [names[start : start + REQUESTS] for start in range(0, len(names), REQUESTS)]
            runs: dict[str, Callable[[], float]] = {
                PLAIN: partial(decode, plain, [None] * REQUESTS, given.steps),
                NONE: partial(decode, adapted, [None] * REQUESTS, given.steps),
                ONE: partial(decode, adapted, [names[0]] * REQUESTS, given.steps),
                EACH: lambda: sum(decode(adapted, turn, given.steps) for turn in turns) / len(turns),
            }
            samples = alternate(runs, given.rounds)
    table = Table(title=f"decode, {REQUESTS} requests, {given.adapters} adapters of rank {given.rank}: {model.name}")
    for column in ("step", "ms", "spread", "share of the speed without pools"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name, sample in samples.items():
        share = samples[PLAIN].paired_ratio(sample)
        table.add_row(name, f"{sample.median * 1e3:.3f}", f"{sample.spread:.0%}", f"{share:.2f}x")
    Console().print(table)
    if given.json is not None:
        given.json.write_text(json.dumps({name: asdict(sample) for name, sample in samples.items()}, indent=1))


def write_adapter(engine: Engine, directory: Path, rank: int, seed: int) -> Path:
    """One of every layer that the engine's adapters may change."""
    pools = engine.adapters.pools
    assert pools is not None
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in (module for product in pools.products for module in product.modules):
        name = f"base_model.model.model.{module.name}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, module.inputs, generator=generator) * 0.01
        tensors[f"{name}.lora_B.weight"] = torch.randn(module.outputs, rank, generator=generator) * 0.01
    directory.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def decode(engine: Engine, adapters: Sequence[str | None], steps: int) -> float:
    """Seconds of a step that gives each request a token, on average, after their prompts were read."""
    params = SamplingParams(max_tokens=steps + REQUESTS + 1, ignore_eos=True)
    jobs = [
        engine.job_builder.job(
            GenerationRequest(
                prompt_token_ids=tuple((index * 31 + 7 * at) % 1000 + 3 for at in range(CONTEXT)),
                params=params,
                request_id=str(index),
                adapter=None if name is None else engine.adapters.get(name),
            )
        )
        for index, name in enumerate(adapters)
    ]
    for job in jobs:
        engine.loop.add(job.first)
    while not all(len(job.first.tokens) > CONTEXT for job in jobs):
        engine.loop.step()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.loop.step()
    seconds = time.perf_counter() - begin
    for job in jobs:
        engine.loop.remove(job.first)
    return seconds / steps


if __name__ == "__main__":
    main()
