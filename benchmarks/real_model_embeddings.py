"""The table of embeddings of benchmarks/real_models.py: MiniLM beside transformers and sentence-transformers."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import llmc
from benchmarks.measure import alternate
from benchmarks.quality import build

_TEXTS, _CHARACTERS = 64, 200


def embedding_rates(path: Path, text: str, threads: int, rounds: int) -> Iterator[str]:
    """Texts per second in turn, and the least cosine between each peer's vectors and llmc's of the same text."""
    step = len(text) // _TEXTS
    texts = [text[begin : begin + _CHARACTERS] for begin in range(0, step * _TEXTS, step)]
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as directory:
        engine_path = Path(directory) / "engine.llmc"
        build(path, engine_path, "cpu", {"task": "embed", "dtype": "float32"})
        with llmc.load(engine_path, threads=threads) as engine:

            def ours() -> Tensor:
                return torch.from_numpy(engine.embed(texts))

            found = {"llmc": ours, **_peers(path, texts)}
            vectors = ours()
            cosines = {name: float((vectors * theirs()).sum(-1).min()) for name, theirs in found.items()}
            runs = {name: partial(_timed, run) for name, run in found.items()}
            samples = alternate(runs, rounds)
    yield "| | texts a second | least cosine to llmc's |"
    yield "|---|--:|--:|"
    for name, sample in samples.items():
        cosine = "" if name == "llmc" else f"{cosines[name]:.6f}"
        yield f"| {name} | {len(texts) / sample.median:.0f} | {cosine} |"


def _peers(path: Path, texts: list[str]) -> dict[str, Callable[[], Tensor]]:
    """What computes the vectors of the texts, by name; both pad a batch to its longest text."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()

    def of_transformers() -> Tensor:
        given = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.inference_mode():
            states = model(**given).last_hidden_state
        mask = given["attention_mask"][..., None]
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))

    found: dict[str, Callable[[], Tensor]] = {"transformers": of_transformers}
    if importlib.util.find_spec("sentence_transformers") is not None:
        library: Any = importlib.import_module("sentence_transformers")
        sentences = library.SentenceTransformer(str(path), device="cpu")

        def of_sentences() -> Tensor:
            vectors: Tensor = sentences.encode(texts, batch_size=len(texts), convert_to_tensor=True)
            return vectors

        found["sentence-transformers"] = of_sentences
    return found


def _timed(run: Callable[[], object]) -> float:
    """Seconds."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
