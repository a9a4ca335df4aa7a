"""Hugging Face transformers, eager, with a static KV cache."""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, StaticCache

from benchmarks.contestants.protocol import serve


class HfEager:
    def __init__(self, model: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).train(False)
        self._generator = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        ids = self._tokens(1, tokens)
        cache = StaticCache(config=self._model.config, max_cache_len=tokens + 1)
        start = time.perf_counter()
        self._forward(ids, 0, cache)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, batch: int, context: int, steps: int) -> float:
        cache = StaticCache(config=self._model.config, max_cache_len=context + steps + 1)
        ids = self._forward(self._tokens(batch, context), 0, cache)
        start = time.perf_counter()
        for step in range(steps):
            ids = self._forward(ids, context + step, cache)
        return (time.perf_counter() - start) / steps

    def _forward(self, ids: torch.Tensor, position: int, cache: StaticCache) -> torch.Tensor:
        positions = torch.arange(position, position + ids.shape[1])
        output = self._model(
            ids,
            past_key_values=cache,
            position_ids=positions[None, :].expand(ids.shape[0], -1),
            cache_position=positions,
            logits_to_keep=1,
        )
        result: torch.Tensor = output.logits[:, -1:].argmax(-1)
        return result

    def _tokens(self, batch: int, length: int) -> torch.Tensor:
        return torch.randint(0, self._model.config.vocab_size, (batch, length), generator=self._generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(HfEager(arguments.model, arguments.dtype, arguments.threads))


if __name__ == "__main__":
    main()
