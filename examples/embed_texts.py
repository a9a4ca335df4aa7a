"""Build an embedder and find what is nearest to a text: python examples/embed_texts.py [MODEL]

MODEL is a directory or a name on the hub, such as Qwen/Qwen3-Embedding-0.6B or sentence-transformers/all-MiniLM-L6-v2.
Without one the small shipped model is taken, whose vectors know how a text ends and little of what it says.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llmc

MODEL = Path(__file__).parent / "models" / "bard-draft"
TEXTS = (
    "The king is dead, my lord.",
    "Once upon a time there was a tree.",
    "My lord, the king is slain.",
    "O, what a rogue and peasant slave am I!",
)


def main(model: str) -> None:
    """Print the texts, the nearest to the first one first."""
    with llmc.compile(model, task="embed", max_model_len=256, max_batch_tokens=256) as engine:
        head = engine.info.head
        print(f"{engine.info.name}: {head}")
        vectors = engine.embed(TEXTS)
        scores = engine.score(TEXTS[0], TEXTS)
    print(f"vectors: {vectors.shape[0]} of {vectors.shape[1]} numbers")
    for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
        print(f"{score:.4f}  {text}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(MODEL))
