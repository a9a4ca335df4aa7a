"""Round a model's weights to 4 bits by llm-compressor's GPTQ, and print the time; runs in the peer's environment.

    PEER_PYTHON -m benchmarks.llm_compressor_gptq MODEL TEXT --sequences 32 --length 256 --group 64 --threads 2

The last line is JSON: seconds, and processor seconds, of `oneshot` alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(given.model)(given.text.read_text(encoding="utf-8")).input_ids
    starts = range(0, given.sequences * given.length, given.length)
    rows = [{"input_ids": ids[start : start + given.length], "attention_mask": [1] * given.length} for start in starts]
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=given.group)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    recipe = GPTQModifier(config_groups={"all": scheme}, ignore=["lm_head"])
    begun, used = time.perf_counter(), time.process_time()
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=recipe,
        max_seq_length=given.length,
        num_calibration_samples=given.sequences,
    )
    print(json.dumps({"seconds": time.perf_counter() - begun, "processor": time.process_time() - used}))


if __name__ == "__main__":
    main()
