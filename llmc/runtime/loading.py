"""Open an engine directory, comparing its weights with their hashes from the first moment on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.engine_format.path_argument import path_argument
from llmc.engine_format.reader import engine_to_run
from llmc.errors import LoadWarning, OptionError, bad_value
from llmc.program import Head, Limits, unused_compression
from llmc.runtime.kv_tier.wish import offloading_wish
from llmc.runtime.ranks.other_rank import work_for_first_rank
from llmc.runtime.speculation.acceptance_config import check_reproducible
from llmc.runtime.speculation.config import SpeculativeConfig, parse_speculative_config

if TYPE_CHECKING:
    from llmc.engine_format.engine_kinds import ExecutorName
    from llmc.files.scratch_directory import ScratchDirectory
    from llmc.runtime.engine import Engine


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    kv_cache_bytes: int | None = None,
    kv_memory: float | None = None,
    max_step_tokens: int | None = None,
    max_sequences: int | None = None,
    prefix_cache: bool = True,
    state_cache_bytes: int | None = None,
    output_cache_bytes: int = 0,
    kv_compression: str | None = None,
    kv_offloading_size: int | str | None = None,
    kv_offloading_dir: str | Path | None = None,
    speculation: str | Mapping[str, object] | None = None,
    check_weights: bool = True,
    executor: ExecutorName | None = None,
    owned: ScratchDirectory | None = None,
) -> Engine:
    """Open an engine directory.

    In a process that torchrun started as a rank other than the first, the call serves that rank and ends the process.

    Args:
        path: The engine directory.
        threads: Threads of a step; default LLMC_THREADS, else the number of available physical cores.
        kv_cache_bytes: Size of the KV cache; default as in `kv_capacity.block_count`. Unused parts take no memory.
        kv_memory: Size of the KV cache as a share of the free memory, of the GPU for GPU engines.
        max_step_tokens: Limit of tokens per step, at most the engine's.
        max_sequences: Limit of sequences per step, at most the engine's.
        prefix_cache: Keep the blocks of finished requests for later requests with the same prefix.
        state_cache_bytes: Size of the cache of a recurrent model's states at the ends of prefixes; default as in
            `snapshot_count`.
        output_cache_bytes: Size of the cache of answers to deterministic requests (greedy, seeded, beam search).
        kv_compression: Policy for the KV cache of requests that name none, within the one that the engine was built
            for; default is that one.
        kv_offloading_size: Size of the second tier for blocks that leave the KV cache: bytes, or a text such as
            "20GB". None disables it.
        kv_offloading_dir: Directory for the second tier, where later processes find prefixes. By default GPU engines
            use memory, and other engines use files that are deleted with the engine.
        speculation: The drafter, as a dict or JSON, as vLLM's --speculative-config.
        check_weights: Compare the weights' hashes in the background; corrupt weights raise EngineFormatError before the
            first token or logit is returned.
        executor: The executor of the steps, by default the one that the engine was built for. "reference" runs a GPU
            engine's graph in torch on the CPU, "triton_interpreter" its kernels.
        owned: A directory to delete with the engine.

    Returns:
        The open engine. Close it, or use it in a `with` statement.

    Raises:
        EngineFormatError: If the directory is not an engine of this version, or its files are corrupt.
        TargetError: If this machine cannot run `executor`. Without the argument the engine still opens, for inspection
            and saving, and its steps raise the error.
        OptionError: If an option contradicts the engine or another option.
        RankError: If ranks cannot be started or found.
    """
    drafts = None if speculation is None else _speculative_config(speculation, output_cache_bytes)
    place = path_argument("path", path)
    offloading = offloading_wish(kv_offloading_size, kv_offloading_dir, prefix_cache=prefix_cache)
    work_for_first_rank(place, threads, executor)
    directory, check = engine_to_run(place, check_weights=check_weights)
    # Not before, because importing the runtime takes as long as comparing the weights does meanwhile.
    from llmc.runtime.engine import Engine
    from llmc.runtime.executors.opening import chosen_executor
    from llmc.runtime.executors.opening_request import CacheRoom
    from llmc.runtime.kv_tier.opening import open_tier
    from llmc.runtime.loop.opening import LoopOpening
    from llmc.runtime.requests.request_policies import RequestPolicies
    from llmc.runtime.speculation.opening import plan_speculation
    from llmc.runtime.threads import thread_count

    policies = RequestPolicies(directory.program, kv_compression)
    unused = None if kv_compression is None else unused_compression(policies.in_use(None), directory.program.limits)
    if unused is not None:
        warnings.warn(unused, LoadWarning, stacklevel=2)
    limits = _checked_limits(directory.program.limits, max_step_tokens, max_sequences)
    whole = _reads_whole_texts(directory.manifest.model.head, limits, max_step_tokens, speculation)
    wish = directory, limits, max_step_tokens
    plan = None if drafts is None else plan_speculation(drafts, *wish, check_weights=check_weights)
    policies.check_drafts(() if plan is None else plan.programs)
    room = CacheRoom(kv_cache_bytes, kv_memory, state_cache_bytes if prefix_cache and not whole else 0)
    tier = None if offloading is None else open_tier(offloading, directory, chosen_executor(directory, executor))
    opening = LoopOpening(*wish, plan, executor, room, thread_count(threads), check, owned is not None, whole, tier)
    caches: dict[str, Any] = {"prefix_cache": prefix_cache, "output_cache_bytes": output_cache_bytes}
    try:
        return Engine(directory, opening.open, policies, owned, check=check, tier=tier, **caches)
    except BaseException:
        if tier is not None:
            tier.close()
        raise


def _checked_limits(limits: Limits, max_step_tokens: int | None, max_sequences: int | None) -> Limits:
    """The limits of a step after loading. Raises OptionError for values above those of the build."""
    _check_limit("max_step_tokens", max_step_tokens, limits.max_batch_tokens, "max_batch_tokens")
    _check_limit("max_sequences", max_sequences, limits.max_sequences, "max_sequences")
    return replace(limits, max_sequences=max_sequences or limits.max_sequences)


def given_or_loaded(engine: Engine | str | Path, speculation: str | Mapping[str, object] | None) -> Engine:
    """The engine, or the one loaded from a directory. Raises OptionError for options that only loading accepts."""
    if isinstance(engine, str | Path):
        return load(path_argument("engine", engine), speculation=speculation)
    if speculation is not None:
        raise OptionError(
            "speculation was given with an engine that is already loaded",
            at="speculation",
            fix="give it to llmc.load, or give the engine's directory instead of the engine",
        )
    return engine


def _speculative_config(given: str | Mapping[str, object], output_cache_bytes: int) -> SpeculativeConfig:
    config = parse_speculative_config(given)
    if output_cache_bytes:
        check_reproducible(config.acceptance)
    return config


def _reads_whole_texts(
    head: Head | None, limits: Limits, max_step_tokens: int | None, speculation: object | None
) -> bool:
    """Whether a text's tokens come in one step. Raises OptionError for options that engines with rows do not
    support."""
    if head is None:
        return False
    if speculation is not None:
        raise OptionError(
            f"the engine is built for {head.task.value} and generates no tokens, so it cannot use speculation",
            at="speculation",
            fix="leave it out",
        )
    if head.whole_texts and max_step_tokens is not None and max_step_tokens < limits.max_model_len:
        raise OptionError(
            f"a step of {max_step_tokens} tokens cannot hold a whole text of {limits.max_model_len}",
            at=f"max_step_tokens={max_step_tokens}",
            fix=f"give at least {limits.max_model_len}, or build with a smaller max_model_len",
        )
    return head.whole_texts


def _check_limit(name: str, value: int | None, most: int, built: str) -> None:
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise bad_value(name, value, f"give a whole number 1 to {most}, the engine's {built}")
