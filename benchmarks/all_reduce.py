"""Sums between two processes of this machine, ours against gloo's; and a decode step of two ranks against one process.

    python -m benchmarks.all_reduce
    python -m benchmarks.all_reduce --engines ALONE.llmc RANKS.llmc --json results.json

All in turns, in one run. A sum: two processes of one thread each add up the same vector of fp32, over and over; a round
is the median of its calls. A step: a token of one request, of the engine of one rank with two threads, and of that of
two ranks with one thread each; and what the simulator says of both, by rates of this machine measured in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from benchmarks.measure import Sample, alternate
from llmc.codegen.cpp.kernel_api import kernel_api
from llmc.codegen.cpp.kernel_library import load_kernels
from llmc.codegen.cpp.measured_rates import measured_rates
from llmc.engine_format import read_engine
from llmc.program.engine_structs import LlmcRanks
from llmc.runtime.loading import load
from llmc.runtime.memory import available_bytes
from llmc.runtime.ranks.channel import SharedMemory
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.simulation.divisions import Division
from llmc.simulation.load import Arrival
from llmc.simulation.pricing import Machine
from llmc.simulation.serve import Served, serve
from llmc.targets import host_target

SIZES = (8 << 10, 16 << 10, 512 << 10)
CALLS = 200
ROUNDS = 7
PROMPT, TOKENS = 32, 24
ALONE, TOGETHER = "one process, 2 threads", "2 ranks, a thread each"


class Summing:
    """One of the two processes: how long a sum takes it, in seconds, by who computes it."""

    def __init__(self, rank: int, descriptor: int, port: int) -> None:
        self._kernels = load_kernels(host_target())
        self._kernels.llmc_pool_create.restype = ctypes.c_void_p
        self._pool = ctypes.c_void_p(self._kernels.llmc_pool_create(1, 1 << 16))
        self._memory = SharedMemory(descriptor, self.memory_bytes())
        self._place = LlmcRanks(rank, 2, self._memory.bytes.ctypes.data, 0)
        distributed: Any = torch.distributed
        store = distributed.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
        self._gloo = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    @staticmethod
    def memory_bytes() -> int:
        """Of what both share."""
        count = load_kernels(host_target()).llmc_ranks_bytes
        count.restype = ctypes.c_int64
        return int(count(2))

    def ours(self, nbytes: int) -> float:
        """The median of CALLS calls of the kernel."""
        x, y = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
        rows = {name: (array.ctypes.data, len(array)) for name, array in (("x", x), ("y", y))}
        place = ctypes.addressof(self._place)
        given = kernel_api().arguments("llmc_all_reduce_f32", {"tokens": 1, "channels": len(x), "ranks": place, **rows})
        sum_up, reference = self._kernels.llmc_all_reduce_f32, ctypes.byref(given)
        seconds = _median(lambda: sum_up(self._pool, reference))
        assert (y == 2).all()
        return seconds

    def gloo(self, nbytes: int) -> float:
        """The median of CALLS calls of torch.distributed."""
        x = torch.zeros(nbytes // 4)
        return _median(lambda: self._gloo.allreduce([x]).wait())


def _median(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def sums() -> dict[str, Sample]:
    """Of each size, ours and gloo's, in turns."""
    memory = SharedMemory.create(Summing.memory_bytes())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "benchmarks.all_reduce", "--rank", str(memory.descriptor), str(port)]
    other = subprocess.Popen(command, pass_fds=(memory.descriptor,))
    os.sched_setaffinity(0, cores[:1])
    try:
        summing = Summing(0, memory.descriptor, port)
        return alternate(_runs(summing), ROUNDS)
    finally:
        os.sched_setaffinity(0, cores)
        other.wait()


def _runs(summing: Summing) -> dict[str, Callable[[], float]]:
    return {
        f"{name}, {nbytes >> 10} KiB": partial(run, nbytes)
        for nbytes in SIZES
        for name, run in (("shared memory", summing.ours), ("gloo", summing.gloo))
    }


def steps(alone: Path, together: Path, rounds: int) -> dict[str, Sample]:
    """Seconds of a token of one request, in turns."""
    with load(alone, threads=2) as one, load(together, threads=2) as ranks:

        def token(engine: Any) -> float:
            begin = time.perf_counter()
            (done,) = engine.generate([list(range(3, 3 + PROMPT))], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
            assert len(done.token_ids) == TOKENS
            return (time.perf_counter() - begin) / TOKENS

        return alternate({ALONE: lambda: token(one), TOGETHER: lambda: token(ranks)}, rounds)


def simulated(engines: dict[str, Path]) -> dict[str, float]:
    """Seconds of a token of the same request by the simulator, by rates that are measured now, of all by the same."""
    programs = {name: read_engine(path, check_weights=False).program for name, path in engines.items()}
    target = host_target()
    rates = measured_rates(target, 2, next(iter(programs.values())))
    print(f"reads {rates.bandwidth / 1e9:.1f} GB/s")
    machine = Machine(target, available_bytes(), rates=rates, threads=2)
    found = {}
    for name, program in programs.items():
        outcome = serve(program, Division(program.layout, 1), machine, [Arrival(0.0, PROMPT, TOKENS)], {})
        assert isinstance(outcome, Served)
        found[name] = max(record.ended for record in outcome.records) / TOKENS
    return found


def main() -> None:
    """Print medians, spreads and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs=2, type=Path, metavar=("ALONE", "RANKS"))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the engines")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--note", help="on the machine's state, for the record")
    parser.add_argument("--rank", nargs=2, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[1:2] or os.sched_getaffinity(0))
        alternate(_runs(Summing(1, *given.rank)), ROUNDS)
        return
    found = sums()
    if given.engines:
        alone, together = given.engines
        found |= steps(alone, together, given.rounds)
    for name, sample in found.items():
        print(f"{name:28} {1e6 * sample.median:10.1f} µs, the best round {1e6 * min(sample.seconds):.1f}")
    said: dict[str, float] = {}
    if given.engines:
        said = simulated(dict(zip((ALONE, TOGETHER), given.engines, strict=True)))
        measured = found[ALONE].median / found[TOGETHER].median
        expected = said[ALONE] / said[TOGETHER]
        print(f"two ranks have {measured:.2f} times the speed of one process; simulated, {expected:.2f} times")
        print(f"the simulated ratio is {expected / measured - 1:+.1%} off")
    if given.json:
        record = {name: sample.seconds for name, sample in found.items()}
        text = json.dumps({"note": given.note, "seconds": record, "simulated seconds": said}, indent=1)
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
