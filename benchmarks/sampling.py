"""Choosing tokens from a step's logits: with the compiled kernel that CPU engines carry, and in numpy.

    python -m benchmarks.sampling [--rows 32] [--vocab 128256] [--threads 2]

Rows are normal numbers of a standard deviation of 3, the same ones in all rounds, one seeded request each; so 95% of
the probability is spread over some thousand tokens, more than models usually leave. Prints milliseconds a step, and
for comparison those of numpy's maximum of the same logits: reading them once, in one thread. What only the host can do
(typical-p, DRY, banned words, users' functions) is done after a prompt of 4096 tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measure import alternate
from llmc.codegen.cpp.kernel_library import load_kernels
from llmc.program import CHOICE_INPUTS
from llmc.program.engine_structs import LlmcChooseRows
from llmc.runtime.sampling.dry_penalty import DryPenalty
from llmc.runtime.sampling.logit_edits import AllowedTokens, BannedSequences, LogitEdit
from llmc.runtime.sampling.logits_processor import CheckedProcessor
from llmc.runtime.sampling.row_choice import BEST, RowChoices
from llmc.runtime.sampling.sampler import DrawRows, Sampler, choose
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.sampling.written_tokens import TokenIds
from llmc.targets import host_target

Logits = npt.NDArray[np.float32]
REPEATS = 10
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k=50": {"temperature": 0.8, "top_k": 50},
    "top_p=0.95": {"temperature": 0.8, "top_p": 0.95},
    "min_p=0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5},
    "typical_p=0.95": {"temperature": 0.8, "typical_p": 0.95},
}
HISTORY = 4096


def logit_edits(prompt: TokenIds, vocabulary: int) -> dict[str, LogitEdit]:
    """By name."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, vocabulary, (1000, 3)).tolist()
    return {
        "dry": DryPenalty(0.8, 1.75, 2, frozenset(range(16)), None),
        "1000 bad words": BannedSequences(tuple(word) for word in words),
        "1000 allowed": AllowedTokens(np.unique(rng.integers(0, vocabulary, 1000))),
        "a function": CheckedProcessor.of(lambda ids, logits: logits, 0),
    }


@contextmanager
def kernel(rows: int, vocabulary: int, threads: int) -> Iterator[DrawRows]:
    """Draws a token of each row as a CPU engine does."""
    library = load_kernels(host_target())
    tokens, scores = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    pool = library.llmc_pool_create(threads, library.llmc_choose_rows_scratch(vocabulary))

    def draw(logits: Logits, choices: RowChoices) -> npt.NDArray[np.int32]:
        arguments = LlmcChooseRows(
            *logits.shape,
            logits.ctypes.data,
            *(getattr(choices, name).ctypes.data for name in CHOICE_INPUTS),
            tokens.ctypes.data,
            scores.ctypes.data,
        )
        library.llmc_choose_rows(pool, ctypes.byref(arguments))
        return tokens

    try:
        yield draw
    finally:
        library.llmc_pool_destroy(pool)


def draw_unchanged(samplers: list[Sampler], logits: Logits, draw: DrawRows) -> None:
    """What a step does whose logits nobody changes."""
    draw(logits, RowChoices.of([choice for sampler in samplers if (choice := sampler.choice()) is not None]))
    for sampler in samplers:
        sampler.count()


def repeated(run: Callable[[], object]) -> float:
    """Seconds of one of REPEATS."""
    begin = time.perf_counter()
    for _ in range(REPEATS):
        run()
    return (time.perf_counter() - begin) / REPEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows, vocabulary = arguments.rows, arguments.vocab
    logits = np.random.default_rng(0).standard_normal((rows, vocabulary), np.float32) * 3
    found: dict[str, dict[str, float]] = {}
    none = np.zeros(0, np.int64)
    # Words of a text come often or seldom; DRY looks at the places of the last one.
    prompt = np.minimum(np.random.default_rng(2).zipf(1.3, HISTORY), vocabulary) - 1
    edits = logit_edits(prompt, vocabulary)
    with kernel(rows, vocabulary, arguments.threads) as draw:
        for name in (*KINDS, *edits):
            given = (edits[name],) if name in edits else ()
            params = [SamplingParams(**KINDS.get(name, {}), seed=i) for i in range(rows)]
            samplers = [Sampler(each, prompt, vocabulary, none, edits=given) for each in params]
            contestants: dict[str, Callable[[], float]] = {
                "numpy": partial(repeated, partial(choose, samplers, logits)),
                "reading": partial(repeated, logits.max),
            }
            if samplers[0].choice() is not None:
                contestants["compiled"] = partial(repeated, partial(draw_unchanged, samplers, logits, draw))
            elif samplers[0].choice_of_scores() not in (BEST, None):
                contestants["compiled"] = partial(repeated, partial(choose, samplers, logits, draw))
            found[name] = {kind: sample.median * 1e3 for kind, sample in alternate(contestants).items()}
    if arguments.json:
        json.dump(found, sys.stdout, indent=1)
        return
    print(f"{rows} rows of {vocabulary} logits, {arguments.threads} threads: milliseconds a step")
    print(f"{'':14} {'compiled':>10} {'numpy':>10} {'one read in numpy':>18}")
    for name, each in found.items():
        ours = f"{each['compiled']:.2f}" if "compiled" in each else "-"
        print(f"{name:14} {ours:>10} {each['numpy']:10.2f} {each['reading']:18.2f}")


if __name__ == "__main__":
    main()
