"""Hugging Face transformers, static batches: padded to the longest prompt, run to the longest output."""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks.contestants.protocol import serve_batches


class HfStatic:
    def __init__(self, model: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).train(False)

    @torch.inference_mode()
    def generate(self, batches: list[list[tuple[list[int], int]]]) -> float:
        start = time.perf_counter()
        for batch in batches:
            longest, length = max(len(prompt) for prompt, _ in batch), max(count for _, count in batch)
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve_batches(HfStatic(arguments.model, arguments.dtype, arguments.threads))


if __name__ == "__main__":
    main()
