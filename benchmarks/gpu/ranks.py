"""llmc on several GPUs: an engine of so many ranks, built beside the plain one, stepped as llmc_model does."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.gpu.llmc_model import LlmcModel
from benchmarks.gpu.measurement import Measurement, report
from benchmarks.gpu.workloads import DECODES, MAX_MODEL_LEN, PREFILLS, decode_bytes, prefill_flops
from llmc.compiler import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    arguments = parser.parse_args()
    model, ranks = arguments.model, arguments.ranks
    engine = model.with_name(f"{model.name}.{ranks}-ranks.llmc")
    if not engine.exists():
        build(
            str(model),
            engine,
            target="auto",
            tensor_parallel_size=ranks,
            max_model_len=MAX_MODEL_LEN,
            max_batch_tokens=8192,
            max_sequences=32,
        )
    config = json.loads((model / "config.json").read_text())
    contestant, ours = LlmcModel(engine), f"llmc on {ranks} GPUs"
    for decode in DECODES:
        report(
            Measurement(model.name, decode.name, ours, contestant.decode(decode), bytes=decode_bytes(config, decode))
        )
    for prefill in PREFILLS:
        flops = prefill_flops(config, prefill)
        report(Measurement(model.name, prefill.name, ours, contestant.prefill(prefill), flops=flops))


if __name__ == "__main__":
    main()
