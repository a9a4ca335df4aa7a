"""Write a checkpoint of random weights and build its engine for this GPU, unless they are there."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch

from benchmarks.gpu.measurement import Measurement, report
from benchmarks.gpu.workloads import MAX_MODEL_LEN
from benchmarks.random_checkpoint import SHAPES, write_checkpoint
from llmc.compiler import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quantize", default="", help="a scheme; its engine lies beside the plain one")
    arguments = parser.parse_args()
    model, engine = (
        arguments.directory / arguments.shape,
        engine_of(arguments.directory, arguments.shape, arguments.quantize),
    )
    start = time.perf_counter()
    if not (model / "config.json").exists():
        shutil.rmtree(model, ignore_errors=True)
        write_checkpoint(arguments.shape, model, device="cuda" if torch.cuda.is_available() else "cpu")
    written = time.perf_counter()
    if not engine.exists():
        build(
            str(model),
            engine,
            target="auto",
            quantize=arguments.quantize,
            max_model_len=MAX_MODEL_LEN,
            max_batch_tokens=8192,
            max_sequences=32,
        )
    report(Measurement("build", "checkpoint", arguments.shape, (written - start,)))
    report(
        Measurement(
            "build", "engine", " ".join((arguments.shape, arguments.quantize)).strip(), (time.perf_counter() - written,)
        )
    )


def engine_of(directory: Path, shape: str, quantize: str) -> Path:
    """Where the engine of a shape and scheme lies."""
    return directory / ".".join(filter(None, (shape, quantize, "llmc")))


if __name__ == "__main__":
    main()
