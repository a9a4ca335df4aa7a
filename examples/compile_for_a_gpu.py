"""Compile for an H100 on a laptop: look at the predicted roofline, check the answers, save, ship.

    python examples/compile_for_a_gpu.py [MODEL]

No GPU is needed but to run the kernels. What needs one says so, with the command that runs it there. The same graph
runs here in torch, slowly, with executor="reference": what it answers is what the GPU is to answer.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import llmc


def main(model: Path, shipped: Path) -> None:
    with llmc.compile(model, target="h100", max_model_len=512, max_batch_tokens=16, max_sequences=4) as engine:
        print(engine.predict(requests=1, context=256))
        print(engine.predict(prefill=16))
        print(engine.explain().partition("\n\n")[0])
        print(f"the whole report: {engine.report().name}")
        engine.save(shipped)
        try:
            engine.generate("KING RICHARD:")
        except llmc.LlmcError as error:  # Without a GPU.
            print(error)

    with llmc.load(shipped, executor="reference") as here:
        print(here.generate("KING RICHARD:", llmc.SamplingParams(max_tokens=8))[0].text)
    print(f"ship it: scp -r {shipped.name} gpu: && ssh gpu llmc run {shipped.name} --prompt 'KING RICHARD:'")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "models" / "bard-draft"
        main(model, Path(folder) / f"{model.name}-h100.llmc")
