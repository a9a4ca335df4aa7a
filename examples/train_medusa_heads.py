"""Train Medusa heads for a model, build them into its engine, and serve with them: the same answers.

    python examples/train_medusa_heads.py

The same on the command line: llmc train-medusa, llmc build --speculative, llmc run --speculative-config.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import llmc

HERE = Path(__file__).parent
MODEL, TEXT = HERE / "models" / "bard-6m", HERE / "data" / "calibration.txt"
PROMPTS = ["KING RICHARD:", "My lord, ", "First Citizen:\nBefore we proceed"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, heads, drafting = (Path(folder) / name for name in ("plain.llmc", "heads/h.safetensors", "medusa.llmc"))
        llmc.build(MODEL, plain, max_model_len=256)
        # Few tokens and epochs, for a look; the defaults take a minute and are right more often.
        trained = llmc.train_medusa(plain, TEXT, heads, tokens=4000, epochs=4)
        for index, head in enumerate(trained.heads):
            print(f"head {index}: top-1 {head.top_1:.2f}, top-5 {head.top_5:.2f}")
        llmc.build(MODEL, drafting, max_model_len=256, speculative=heads)
        with llmc.load(plain) as engine:
            answers = engine.generate(PROMPTS, max_tokens=60, temperature=0.0)
        with llmc.load(drafting, speculation={"method": "medusa"}) as engine:
            again = engine.generate(PROMPTS, max_tokens=60, temperature=0.0)
            stats = engine.loop.speculation.stats if engine.loop.speculation is not None else None
        for first, second in zip(answers, again, strict=True):
            assert first.choices[0].text == second.choices[0].text
        print("the same answers, to the last token")
        if stats is not None:
            print(f"{stats.accepted_tokens} of {stats.draft_tokens} drafts came true; load decides how many are made")


if __name__ == "__main__":
    main()
