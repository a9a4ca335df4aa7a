"""Texts a second of an encoder: llmc against transformers, which pads a batch to its longest text as
sentence-transformers does, in turn in one run, on random weights of a real shape.

    python -m benchmarks.embeddings
    python -m benchmarks.embeddings --dtype bfloat16 --texts 64 --json results.json

Texts have 8 to 128 tokens. Both get them sorted by length, which spares transformers most of the padding.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import llmc
from benchmarks.measure import ROUNDS, alternate

# all-MiniLM-L6-v2 and bge-base-en-v1.5.
SHAPES = {
    "minilm-l6": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
    "bge-base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
}
BATCH = 32


def main() -> None:
    """Measure in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="minilm-l6")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quantize", default="")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    from transformers import BertConfig, BertModel

    made: Any = BertModel
    config: Any = BertConfig
    model = made(config(**SHAPES[given.shape]), add_pooling_layer=False).eval()
    model = model.to(getattr(torch, given.dtype))
    rng = np.random.default_rng(0)
    texts = sorted((rng.integers(1000, 30000, n).tolist() for n in rng.integers(8, 129, given.texts)), key=len)
    with (
        tempfile.TemporaryDirectory(prefix="llmc-embeddings-") as folder,
        llmc.load(built(model, Path(folder), given.quantize), threads=given.threads) as engine,
    ):
        runs = {
            "llmc": seconds(lambda: engine.embed(texts)),
            "transformers": seconds(lambda: padded(model, texts)),
        }
        samples = alternate(runs, given.rounds)
        ours, theirs = engine.embed(texts), padded(model, texts)
    closest = float((ours * theirs).sum(1).min())
    table = Table(
        "", "texts a second", "tokens a second", title=f"{given.shape}, {given.dtype}, {given.threads} threads"
    )
    for name, sample in samples.items():
        rate = 1 / sample.median
        table.add_row(name, f"{given.texts * rate:.0f}", f"{sum(map(len, texts)) * rate:.0f}")
    Console().print(table)
    ratio = samples["transformers"].paired_ratio(samples["llmc"])
    Console().print(f"llmc / transformers: {ratio:.2f}; least cosine {closest:.6f}")
    if given.json is not None:
        given.json.write_text(json.dumps({name: asdict(sample) for name, sample in samples.items()}, indent=1))


def built(model: Any, folder: Path, quantize: str) -> Path:
    """An engine whose steps hold several texts."""
    path = folder / "embedder.llmc"
    llmc.build(model, path, max_batch_tokens=1024, quantize=quantize)
    return path


def seconds(run: Callable[[], Any]) -> Callable[[], float]:
    """How long it takes."""

    def timed() -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return timed


def padded(model: Any, texts: Sequence[Sequence[int]]) -> Any:
    """Means of the last states of batches of BATCH texts, scaled to length 1: [texts, width], fp32."""
    found = []
    with torch.inference_mode():
        for first in range(0, len(texts), BATCH):
            batch = texts[first : first + BATCH]
            longest = max(map(len, batch))
            ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in batch])
            mask = torch.arange(longest)[None] < torch.tensor([len(text) for text in batch])[:, None]
            states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
            weights = mask[:, :, None].float()
            found.append(torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1)))
    return torch.cat(found).numpy()


if __name__ == "__main__":
    main()
