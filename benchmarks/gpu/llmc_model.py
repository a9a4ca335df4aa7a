"""llmc on a GPU: an engine stepped by the runtime's own loop with greedy sampling, its prompts really read."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.gpu.measurement import Measurement, report
from benchmarks.gpu.weightless import open_weightless
from benchmarks.gpu.workloads import (
    DECODE_STEPS,
    DECODES,
    PREFILLS,
    ROUNDS,
    Decode,
    Prefill,
    decode_bytes,
    prefill_flops,
)
from llmc.engine_format import read_engine
from llmc.runtime.executors.cuda_opening import open_engine
from llmc.runtime.executors.opening_request import CacheRoom, OpeningRequest
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.request import Origin
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams


class LlmcModel:
    """The engine with a cache for the largest workload. drawn: its weights are not in its files."""

    def __init__(self, path: Path, drawn: bool = False) -> None:
        directory = read_engine(path, check_weights=False)
        self._limits, self._vocab_size = directory.program.limits, directory.program.vocab_size
        if drawn:
            executor, blocks = open_weightless(directory)
        else:
            executor, blocks = open_engine(OpeningRequest(directory, 1, CacheRoom(None, None, None)))
        self._loop = StepLoop(executor, self._limits, blocks, program=directory.program)
        self._random = np.random.default_rng(0)

    def measure(self, work: Decode | Prefill) -> tuple[float, ...]:
        """Seconds of the rounds, each a step on average or a prompt."""
        return self.prefill(work) if isinstance(work, Prefill) else self.decode(work)

    def prefill(self, work: Prefill) -> tuple[float, ...]:
        seconds = []
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            request = self._request(work.tokens)
            while not request.output:
                self._loop.step()
            seconds.append(time.perf_counter() - start)
            self._loop.remove(request)
        return tuple(seconds[1:])

    def decode(self, work: Decode) -> tuple[float, ...]:
        requests = [self._request(work.context) for _ in range(work.batch)]
        while not all(request.output for request in requests):
            self._loop.step()
        # A graph is captured at its second use; sequences that were read first may also have moved on by some tokens.
        seconds = [self._steps() for _ in range(ROUNDS + 1)]
        for request in requests:
            self._loop.remove(request)
        return tuple(seconds[1:])

    def _steps(self) -> float:
        start = time.perf_counter()
        for _ in range(DECODE_STEPS):
            self._loop.step()
        return (time.perf_counter() - start) / DECODE_STEPS

    def _request(self, length: int) -> Generation:
        tokens = self._random.integers(0, self._vocab_size, length)
        sampler = Sampler(SamplingParams(), tokens, self._vocab_size, np.zeros(0, np.int64))
        ending = Ending(frozenset(), frozenset(), self._limits.max_model_len)
        request = Generation(tokens.tolist(), sampler, ending, origin=Origin(salt=None))
        self._loop.add(request)
        return request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="the checkpoint, for its config.json")
    parser.add_argument("engine", type=Path)
    parser.add_argument("--scheme", help="of a quantized engine, whose steps read less than the checkpoint's bytes")
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    contestant, group = LlmcModel(arguments.engine), arguments.model.name
    ours = "llmc" if arguments.scheme is None else f"llmc {arguments.scheme}"
    for decode in DECODES:
        moved = decode_bytes(config, decode) if arguments.scheme is None else 0.0
        report(Measurement(group, decode.name, ours, contestant.decode(decode), bytes=moved))
    for prefill in PREFILLS:
        report(
            Measurement(group, prefill.name, ours, contestant.prefill(prefill), flops=prefill_flops(config, prefill))
        )


if __name__ == "__main__":
    main()
