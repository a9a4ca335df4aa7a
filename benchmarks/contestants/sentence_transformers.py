"""sentence-transformers: vectors of texts, a batch at once."""

from __future__ import annotations

import argparse

import torch
from sentence_transformers import SentenceTransformer

from benchmarks.contestants.protocol import serve_texts


class Sentences:
    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = SentenceTransformer(model, device="cpu")

    def embed(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._model.encode(texts, batch_size=len(texts)).tolist()
        return vectors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve_texts(Sentences(arguments.model, arguments.threads))


if __name__ == "__main__":
    main()
