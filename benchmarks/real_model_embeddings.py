"""The table of embeddings of benchmarks/real_models.py: MiniLM beside transformers and sentence-transformers."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

import llmc
from benchmarks.contestants.protocol import ContestantProcess
from benchmarks.measure import alternate
from benchmarks.quality import build

_TEXTS, _CHARACTERS = 64, 200

# Seconds, and the vectors of the texts.
Embed = Callable[[], tuple[float, Tensor]]


def embedding_rates(path: Path, text: str, threads: int, rounds: int, peer: str | None) -> Iterator[str]:
    """Texts per second in turn, and how each peer's vectors differ from llmc's of the same text.

    Args:
        path: the model's directory.
        text: what the texts are cut from.
        threads: of each contestant.
        rounds: that are measured.
        peer: a Python with sentence-transformers, if it is to be measured.
    """
    step = len(text) // _TEXTS
    texts = [text[begin : begin + _CHARACTERS] for begin in range(0, step * _TEXTS, step)]
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        engine_path = Path(directory) / "engine.llmc"
        build(path, engine_path, "cpu", {"task": "embed", "dtype": "float32"})
        engine = stack.enter_context(llmc.load(engine_path, threads=threads))
        embed = {
            "llmc": _timed(lambda: torch.from_numpy(engine.embed(texts))),
            "transformers": _timed(_of_transformers(path, texts)),
        }
        if peer is not None:
            process = stack.enter_context(_sentence_transformers(peer, path, threads))
            embed[process.name] = lambda: _in_process(process, texts)
        found = {name: run()[1] for name, run in embed.items()}
        samples = alternate({name: _seconds(run) for name, run in embed.items()}, rounds)
    yield "| | texts per second | least cosine to llmc's | largest difference |"
    yield "|---|--:|--:|--:|"
    for name, sample in samples.items():
        ours, theirs = found["llmc"], found[name]
        compared = f"{float((ours * theirs).sum(-1).min()):.6f} | {float((ours - theirs).abs().max()):.1e}"
        yield f"| {name} | {len(texts) / sample.median:.0f} | {' | ' if name == 'llmc' else compared} |"


def _of_transformers(path: Path, texts: list[str]) -> Callable[[], Tensor]:
    """The mean of the last layer's states; a batch is padded to its longest text."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()

    def vectors() -> Tensor:
        given = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.inference_mode():
            states = model(**given).last_hidden_state
        mask = given["attention_mask"][..., None]
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))

    return vectors


def _sentence_transformers(python: str, path: Path, threads: int) -> ContestantProcess:
    """It pads like transformers, in an environment of its own."""
    module, given = "benchmarks.contestants.sentence_transformers", [str(path.absolute()), "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return ContestantProcess("sentence-transformers", python, module, given, environment)


def _in_process(process: ContestantProcess, texts: list[str]) -> tuple[float, Tensor]:
    seconds, vectors = process.embed(texts)
    return seconds, torch.tensor(vectors)


def _timed(run: Callable[[], Tensor]) -> Embed:
    def timed() -> tuple[float, Tensor]:
        begun = time.perf_counter()
        found = run()
        return time.perf_counter() - begun, found

    return timed


def _seconds(run: Embed) -> Callable[[], float]:
    return lambda: run()[0]
