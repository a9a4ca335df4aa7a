"""OpenVINO through openvino-genai's LLMPipeline, which computes the logits of the last row only.

MODEL is what optimum-intel exports, in an environment of its own (openvino-genai, optimum-intel, nncf):

    optimum-cli export openvino --model CHECKPOINT --task text-generation-with-past --weight-format int8 MODEL
    optimum-cli export openvino … --weight-format int4 --group-size 128 --sym --ratio 1.0 MODEL
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np
import openvino
import openvino_genai

from benchmarks.contestants.protocol import serve


class OpenVinoGenai:
    def __init__(self, model: str, threads: int) -> None:
        # Without a tokenizer: the benchmark speaks in token ids.
        self._pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)
        self._random = random.Random(0)

    def prefill(self, tokens: int) -> float:
        return self._generate(1, tokens, 1)

    def decode(self, batch: int, context: int, steps: int) -> float:
        # The class times whole requests only, so the prompt's share is measured apart and taken away.
        return (self._generate(batch, context, 1 + steps) - self._generate(batch, context, 1)) / steps

    def _generate(self, batch: int, context: int, tokens: int) -> float:
        ids = [[self._random.randrange(1000, 100000) for _ in range(context)] for _ in range(batch)]
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(np.array(ids, np.int64)), openvino.Tensor(np.ones((batch, context), np.int64))
        )
        options = openvino_genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos, options.do_sample = tokens, True, False
        start = time.perf_counter()
        self._pipeline.generate(inputs, options)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(OpenVinoGenai(arguments.model, arguments.threads))


if __name__ == "__main__":
    main()
