"""Check that a program's numbers are consistent, before they are used.

The assumptions of a CPU engine's library are compared with the library itself (program/program_interface.py). Memory
accesses of a GPU's launches are checked where launches are planned (runtime/device/launch_check.py).
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from llmc.errors import EngineFormatError, LlmcError
from llmc.files.typed_json import REBUILD
from llmc.program import ITEMSIZES, AdapterPools, Affine, Buffer, CacheSlot, Program, RowCount

_MOST_COUNT = 2**31 - 1
_MOST_RANKS = 1 << 16
# The address space of a process.
_MOST_BYTES = 1 << 47
_ADAPTER_DTYPES = ("F32", "F16", "BF16")


def check_program(program: Program, at: Path) -> None:
    """Raise EngineFormatError for the first thing that cannot be. at: the file it was read from."""
    for problem in _problems(program):
        raise EngineFormatError(problem, at=at, fix=REBUILD)


def _problems(program: Program) -> Iterator[str]:
    counts = {**asdict(program.limits), "vocab_size": program.vocab_size}
    for name, value in counts.items():
        if not 1 <= value <= _MOST_COUNT:
            yield f"{name} is {value}"
    if not 0 <= program.hidden_width <= _MOST_COUNT:
        yield f"hidden_width is {program.hidden_width}"
    layout = program.layout
    if not (1 <= layout.tensor <= _MOST_RANKS and 0 <= program.stage < layout.pipeline <= _MOST_RANKS):
        yield f"stage {program.stage} of {layout.pipeline} has {layout.tensor} ranks"
    if not 0 <= program.hands_over <= _MOST_COUNT:
        yield f"hands_over is {program.hands_over}"
    if (program.hands_over > 0) != (program.stage < layout.pipeline - 1):
        yield f"stage {program.stage} of {layout.pipeline} hands over {program.hands_over} numbers per token"
    for slot in program.weights:
        if slot.dtype not in ITEMSIZES:
            yield f"weight {slot.name!r} has the dtype {slot.dtype!r}"
    yield from _repeated("weight", [slot.name for slot in program.weights])
    for index, cache in enumerate(program.caches):
        yield from _cache_problems(index, cache)
    for index, state in enumerate(program.states):
        if not all(0 <= size <= _MOST_COUNT for size in state.shape):
            yield f"state {index} has the shape {list(state.shape)}"
    if program.adapters is not None:
        yield from _adapter_problems(program.adapters)
    yield from _affine_problems("the arena", program.arena)
    yield from _repeated("buffer", [buffer.name for buffer in program.buffers])
    for buffer in program.buffers:
        yield from _buffer_problems(program, buffer)


def _repeated(kind: str, names: list[str]) -> Iterator[str]:
    if len(set(names)) < len(names):
        yield f"a {kind}'s name appears twice: {next(n for n in names if names.count(n) > 1)!r}"


def _cache_problems(index: int, cache: CacheSlot) -> Iterator[str]:
    for name in ("kv_heads", "head_dim", "value_dim"):
        if not 1 <= getattr(cache, name) <= _MOST_COUNT:
            yield f"cache {index} has {name}={getattr(cache, name)}"
    if cache.dtype not in ITEMSIZES:
        yield f"cache {index} has the dtype {cache.dtype!r}"
    try:
        cache.widths()
    except LlmcError as error:
        yield f"cache {index}: {error.problem}"


def _adapter_problems(pools: AdapterPools) -> Iterator[str]:
    for name in ("slots", "max_rank"):
        if not 1 <= getattr(pools, name) <= _MOST_COUNT:
            yield f"adapters have {name}={getattr(pools, name)}"
    for product in pools.products:
        if product.dtype not in _ADAPTER_DTYPES:
            yield f"adapters of {product.name!r} have the dtype {product.dtype!r}"
        for name in ("inputs", "columns"):
            if not 1 <= getattr(product, name) <= _MOST_COUNT:
                yield f"adapters of {product.name!r} have {name}={getattr(product, name)}"


def _affine_problems(what: str, affine: Affine) -> Iterator[str]:
    for name, value in asdict(affine).items():
        if not 0 <= value <= _MOST_BYTES:
            yield f"{what} has {name}={value} bytes"


def _buffer_problems(program: Program, buffer: Buffer) -> Iterator[str]:
    if buffer.dtype not in ITEMSIZES:
        yield f"buffer {buffer.name!r} has the dtype {buffer.dtype!r}"
    if not 1 <= buffer.columns <= _MOST_BYTES:
        yield f"buffer {buffer.name!r} has {buffer.columns} columns"
    yield from _affine_problems(f"buffer {buffer.name!r}", buffer.offset)
    # Places only grow with tokens and rows, and the memory is that of the largest step.
    tokens, rows = program.limits.max_batch_tokens, program.limits.max_logit_rows
    count = {RowCount.TOKENS: tokens, RowCount.LOGIT_ROWS: rows, RowCount.ONE: 1}[buffer.rows]
    end = buffer.offset.at(tokens=tokens, logit_rows=rows) + count * buffer.columns * ITEMSIZES[buffer.dtype]
    arena = program.arena.at(tokens=tokens, logit_rows=rows)
    if end > arena:
        yield f"buffer {buffer.name!r} ends at byte {end} of the largest step's arena of {arena}"
