"""OpenVINO GenAI with `CacheEvictionConfig`, which reads a GGUF file of a llama model itself.

    python -m venv PEERS && PEERS/bin/pip install openvino-genai

Blocks of 32 rows (CPU) leave after the prompt: the first `--start` and the last `--recent` rows stay, and of the rows
between them those that the last queries attend to most.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import openvino
import openvino_genai

from benchmarks.contestants.protocol import serve_answers


class OpenVinoEviction:
    """A pipeline. rows: that stay, 0 for all."""

    def __init__(self, model: str, threads: int, rows: int, start: int, recent: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.cache_size = False, 1
        if rows:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = openvino_genai.CacheEvictionConfig(
                start, recent, rows, openvino_genai.AggregationMode.NORM_SUM
            )
        options = {"INFERENCE_NUM_THREADS": threads, "scheduler_config": scheduler}
        self._pipeline = openvino_genai.LLMPipeline(model, "CPU", **options)

    def answer(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
        options = openvino_genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos, options.do_sample = tokens, True, False
        said, begin = list[list[int]](), time.perf_counter()
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], np.int64))
            mask = openvino.Tensor(np.ones((1, len(prompt)), np.int64))
            found = self._pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), options)
            said.append([int(token) for token in found.tokens[0]])
        return said, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--start", type=int, default=32)
    parser.add_argument("--recent", type=int, default=128)
    given = parser.parse_args()
    serve_answers(OpenVinoEviction(given.model, given.threads, given.rows, given.start, given.recent))


if __name__ == "__main__":
    main()
