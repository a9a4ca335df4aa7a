"""llmc: an engine directory, stepped by the runtime's own loop with greedy sampling."""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.contestants.protocol import serve
from llmc.codegen.cpp.probes import Memory, open_probes
from llmc.engine_format import read_engine
from llmc.runtime.executors.cpp import open_cpp
from llmc.runtime.kv_capacity import block_count
from llmc.runtime.loop.step import Step
from llmc.runtime.loop.step_loop import StepLoop
from llmc.runtime.requests.ending import Ending
from llmc.runtime.requests.generation import Generation
from llmc.runtime.requests.request import Origin
from llmc.runtime.sampling.sampler import Sampler
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.targets import host_target


class LlmcEngine:
    def __init__(self, path: Path, threads: int) -> None:
        directory = read_engine(path, check_weights=False)
        blocks = block_count(directory.program, 2 << 30)
        self._limits = directory.program.limits
        self._vocab_size = directory.program.vocab_size
        executor = open_cpp(directory, blocks, threads)
        self._executor = executor
        self._loop = StepLoop(executor, self._limits, blocks, program=directory.program)
        self._threads = threads
        self._generator = np.random.default_rng(0)

    def prefill(self, tokens: int) -> float:
        request = self._request(tokens)
        start = time.perf_counter()
        self._step_until_first_token([request])
        seconds = time.perf_counter() - start
        self._loop.remove(request)
        return seconds

    def decode(self, batch: int, context: int, steps: int) -> float:
        requests = [self._request(context) for _ in range(batch)]
        self._step_until_first_token(requests)
        start = time.perf_counter()
        for _ in range(steps):
            self._loop.step()
        seconds = time.perf_counter() - start
        for request in requests:
            self._loop.remove(request)
        return seconds / steps

    def prefill_and_decode(self, context: int, steps: int) -> list[float]:
        request = self._request(context)
        times = [time.perf_counter()]
        self._step_until_first_token([request])
        times.append(time.perf_counter())
        for _ in range(steps):
            self._loop.step()
            times.append(time.perf_counter())
        self._loop.remove(request)
        return [end - start for start, end in pairwise(times)]

    def decode_behind(self, rows: int, steps: int) -> list[float]:
        """Decode with tables of blocks that nothing was written to.

        The first step is not counted, because it reads weights from the file.
        """
        times = list[float]()
        for place in range(rows, rows + steps + 1):
            step = self._step_behind(place)
            start = time.perf_counter()
            self._executor.step(step)
            times.append(time.perf_counter() - start)
        return times[1:]

    def decode_and_read(self, context: int, steps: int, nbytes: int) -> list[list[float]]:
        request = self._request(context)
        self._step_until_first_token([request])
        stepped, read = list[float](), list[float]()
        with open_probes(host_target(), self._threads) as probes, Memory(nbytes) as memory:
            for _ in range(steps):
                start = time.perf_counter()
                self._loop.step()
                stepped.append(time.perf_counter() - start)
                read.append(probes.read_seconds(memory))
        self._loop.remove(request)
        return [stepped, read]

    def _step_behind(self, rows: int) -> Step:
        """One token of a sequence whose rows lie in the first blocks."""
        (token,) = self._generator.integers(0, self._vocab_size, 1, np.int32)
        blocks = np.arange(rows // self._limits.block_size + 1, dtype=np.int32)
        one = np.array([rows], np.int32)
        return Step(
            input_ids=np.array([token], np.int32),
            positions=one,
            slot_mapping=one,
            query_starts=np.array([0, 1], np.int32),
            context_lens=one + 1,
            block_tables=blocks[None],
            logit_rows=np.zeros(1, np.int32),
            tree_masks=np.zeros(1, np.int64),
        )

    def _request(self, length: int) -> Generation:
        tokens = self._generator.integers(0, self._vocab_size, length)
        sampler = Sampler(SamplingParams(), tokens, self._vocab_size, np.zeros(0, np.int64))
        ending = Ending(frozenset(), frozenset(), self._limits.max_model_len)
        request = Generation(tokens.tolist(), sampler, ending, origin=Origin(salt=None))
        self._loop.add(request)
        return request

    def _step_until_first_token(self, requests: list[Generation]) -> None:
        while not all(request.output for request in requests):
            self._loop.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(LlmcEngine(arguments.engine, arguments.threads))


if __name__ == "__main__":
    main()
