"""Trees in the executors: rows of logits are those of chains, and rows of caches move exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmc.engine_format.reader import read_engine
from llmc.formats.cache_format import parse_cache_formats
from llmc.ops.cache_codes import read_codes, write_codes
from llmc.ops.kv_write import write_slots
from llmc.program import Affine, CacheSlot, Limits, Program
from llmc.program.slot_views import move_slots, slot_views
from llmc.runtime.executors.cpp import CppExecutor
from llmc.runtime.executors.reference import ReferenceExecutor
from tests.runtime.tiny_engine import LIMITS, write_tiny_engine
from tests.tree_steps import TABLE, check_trees


@pytest.mark.parametrize("seed", range(6))
def test_the_reference(tmp_path: Path, seed: int) -> None:
    executor = ReferenceExecutor(read_engine(write_tiny_engine(tmp_path / "tiny.llmc")), len(TABLE))
    check_trees(executor, LIMITS.block_size, 97, 5, seed)


@pytest.mark.parametrize("seed", range(6))
def test_a_compiled_engine(draft_engine: Path, seed: int) -> None:
    engine = read_engine(draft_engine)
    executor = CppExecutor(engine, len(TABLE), 2)
    check_trees(executor, engine.program.limits.block_size, 4096, 12, seed)
    executor.close()


@pytest.mark.parametrize("format", [None, "int8", "int8:g8", "int4:g16", "int4:head", "fp8", "fp8:g8", "int8/int4:g8"])
@pytest.mark.parametrize("block_size", [1, 8, 24])
def test_rows_move_exactly_in_every_format(format: str | None, block_size: int) -> None:
    """Keys of 32 and values of 16 channels, as arrays of NumPy and as tensors."""
    coded = None if format is None else parse_cache_formats(format)
    cache = CacheSlot(2, 32, 16, "BF16" if coded is None else "U8", None if coded is None else str(coded))
    program = Program(Limits(8, 1, 8, 64, block_size), 97, Affine(), Affine(), (), (), (cache,))
    generator = torch.Generator().manual_seed(0)
    memories, before = [], []
    own = [None if coded is None else str(coded.of(part)) for part in "kv"]
    for channels, width, text in zip((32, 16), cache.widths(), own, strict=True):
        held = torch.zeros(5, 2, block_size, width, dtype=torch.bfloat16 if coded is None else torch.uint8)
        values = torch.randn(5 * block_size, 2, channels, generator=generator)
        every = torch.arange(5 * block_size)
        write_slots(values, held, every) if text is None else write_codes(values, held, every, text)
        memories.append(held)
        before.append(values_of(held, channels, text))
    count = 5 * block_size
    order = torch.randperm(count, generator=generator)
    sources, destinations = order[: count // 2], order.roll(1)[: count // 2]
    as_bytes = [held.view(torch.uint8).reshape(-1) for held in memories]
    arrays = [byte.numpy().copy() for byte in as_bytes]
    move_slots(slot_views(program, arrays), sources.numpy(), destinations.numpy())
    move_slots(slot_views(program, as_bytes), sources, destinations)
    assert all((array == tensor.numpy()).all() for array, tensor in zip(arrays, as_bytes, strict=True))
    for held, old, channels, text in zip(memories, before, (32, 16), own, strict=True):
        expected = old.clone()
        expected[destinations] = old[sources]
        assert torch.equal(values_of(held, channels, text), expected)


def values_of(held: torch.Tensor, channels: int, format: str | None) -> torch.Tensor:
    """By slot: [slots, heads, channels]."""
    values = held.float() if format is None else read_codes(held, channels, format)
    return values.transpose(1, 2).flatten(0, 1)
