"""Open an engine directory, comparing its weights with their hashes from the first moment on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.engine_format.path_argument import path_argument
from llmc.engine_format.reader import read_engine, start_engine
from llmc.errors import OptionError
from llmc.program import Limits
from llmc.runtime.speculation.config import OPTION, SpeculativeConfig, new_drafter, parse_speculative_config

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

    from llmc.runtime.engine import Engine
    from llmc.runtime.executors.opening import ExecutorName
    from llmc.runtime.speculation.speculation import Speculation


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    kv_cache_bytes: int | None = None,
    kv_memory: float | None = None,
    max_step_tokens: int | None = None,
    max_sequences: int | None = None,
    prefix_cache: bool = True,
    output_cache_bytes: int = 0,
    speculation: str | Mapping[str, object] | None = None,
    check_weights: bool = True,
    executor: ExecutorName | None = None,
    owned: TemporaryDirectory[str] | None = None,
) -> Engine:
    """Open an engine directory.

    executor: what runs the steps; by default what the engine was built for. If this machine cannot run that, the engine
    opens all the same, to be looked at and saved, and its steps raise TargetError; one that is named is there or is an
    error at once. "reference" runs a GPU engine's graph in torch, "triton_interpreter" its kernels, on the CPU.
    threads: of a step; default LLMC_THREADS, else the physical cores available. kv_cache_bytes: default as in
    kv_capacity.block_count; untouched parts of it cost nothing. kv_memory: the same as a share of the free memory (a
    GPU's on a GPU). max_step_tokens, max_sequences: lower limits of a step than the engine was built for.
    prefix_cache: keep the blocks of finished requests for those that begin alike.
    output_cache_bytes: keep the answers to requests without chance (greedy, seeded, beam search). speculation: what
    drafts tokens that may come next, in a dict or JSON, as vLLM's --speculative-config. check_weights: compare the
    weights' hashes, beside the start: if they are corrupt, EngineFormatError is raised before the first
    token or logit leaves. owned: a temporary directory to delete when the engine is closed. Raises
    EngineFormatError, TargetError, OptionError.
    """
    drafts = None if speculation is None else parse_speculative_config(speculation)
    place, check = path_argument("path", path), None
    if check_weights:
        directory, check = start_engine(place)
    else:
        directory = read_engine(place, check_weights=False, check_machine=False)
    # Not before, because importing the runtime takes as long as comparing the weights does meanwhile.
    from llmc.runtime.engine import Engine
    from llmc.runtime.executors.opening import open_or_explain
    from llmc.runtime.loop.step_loop import StepLoop
    from llmc.runtime.threads import thread_count

    limits = directory.program.limits
    _check_limit("max_step_tokens", max_step_tokens, limits.max_batch_tokens, "max_batch_tokens")
    _check_limit("max_sequences", max_sequences, limits.max_sequences, "max_sequences")
    limits = replace(limits, max_sequences=max_sequences or limits.max_sequences)
    speculates = None if drafts is None else _speculation(drafts, limits, max_step_tokens)
    is_temporary = owned is not None
    opened, blocks = open_or_explain(
        directory, executor, kv_cache_bytes, kv_memory, thread_count(threads), is_temporary, check
    )
    loop = StepLoop(opened, limits, blocks, max_step_tokens, speculation=speculates)
    return Engine(
        directory, opened, loop, owned, prefix_cache=prefix_cache, output_cache_bytes=output_cache_bytes, check=check
    )


def _check_limit(name: str, value: int | None, most: int, built: str) -> None:
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise OptionError(
            f"{name} cannot be {value!r}",
            at=f"{name}={value!r}",
            fix=f"give a whole number 1 to {most}, the engine's {built}",
        )


def _speculation(config: SpeculativeConfig, limits: Limits, max_step_tokens: int | None) -> Speculation:
    from llmc.runtime.speculation.speculation import Speculation

    most = config.num_speculative_tokens
    room = min(max_step_tokens or limits.max_batch_tokens, limits.max_batch_tokens, limits.max_logit_rows) - 1
    if most > room:
        larger = "rebuild the engine with larger max_batch_tokens and max_logit_rows"
        raise OptionError(
            f"num_speculative_tokens is {most}, and a step has room for {room} beside the token before them",
            at=OPTION,
            fix=f"give {room} at most, or {larger}" if room else larger,
        )
    return Speculation(partial(new_drafter, config), most)
