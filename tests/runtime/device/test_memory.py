"""The GPU's memory: what is planned, and what is said when it does not suffice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmc.errors import OptionError
from llmc.program import RankLayout, StateSlot
from llmc.runtime.device.memory import (
    RESERVED_BYTES,
    memory_of_blocks,
    out_of_memory,
    plan_device_memory,
    plan_stage_memory,
)
from tests.runtime.device.device_program import LIMITS, program

GB = 10**9
PER_SEQUENCE = LIMITS.max_model_len // LIMITS.block_size
BLOCK_BYTES = 2 * 2 * 64 * 16 * 2


def test_the_cache_is_as_large_as_every_sequence_needs_and_no_larger() -> None:
    memory = plan_device_memory(program(), 80 * GB, None)
    assert memory.blocks == LIMITS.max_sequences * PER_SEQUENCE
    assert memory.cache == (memory.blocks + 1) * BLOCK_BYTES
    assert memory.arena == 4096 + 256 * 512 + 8 * 32
    assert memory.logits == 32 * 1000 * 4


def test_the_cache_takes_what_is_left() -> None:
    fixed = plan_device_memory(program(), 80 * GB, None)
    others = fixed.weights + fixed.arena + fixed.logits + fixed.inputs + RESERVED_BYTES
    memory = plan_device_memory(program(), others + 1001 * BLOCK_BYTES, None)
    assert memory.blocks == 1000
    assert plan_device_memory(program(), 80 * GB, 500 * BLOCK_BYTES).blocks == 500


def test_too_little_memory_is_refused_with_the_sum() -> None:
    with pytest.raises(
        OptionError, match=r"max_model_len=4096 .* weights .* arena .* KV cache .* the GPU has"
    ) as error:
        plan_device_memory(program(), RESERVED_BYTES, None)
    assert "max_batch_tokens" in str(error.value.fix)
    with pytest.raises(OptionError, match="kv_cache_bytes=1"):
        plan_device_memory(program(), 80 * GB, 1)


def test_a_rank_has_the_cache_of_its_own_gpu() -> None:
    """Bytes of the cache that are given by number are those of all ranks together."""
    alone = program()
    ranked = replace(alone, layout=RankLayout(4))
    fixed = memory_of_blocks(alone, 0)
    free = fixed.fixed + fixed.cache + RESERVED_BYTES + 1000 * BLOCK_BYTES
    for each in (alone, ranked):
        assert plan_device_memory(each, free, None).blocks == 1000
        assert plan_device_memory(each, 80 * GB, each.ranks * 500 * BLOCK_BYTES).blocks == 500


def test_all_stages_have_the_blocks_that_the_fullest_one_holds() -> None:
    layout = RankLayout(1, 2)
    first = replace(program(), layout=layout, hands_over=64)
    last = replace(program(), layout=layout, stage=1, hidden_width=64, caches=program().caches * 3)
    of_last = memory_of_blocks(last, 0)
    free = of_last.fixed + of_last.cache + RESERVED_BYTES + 1000 * 3 * BLOCK_BYTES
    memory = plan_stage_memory([first, last], free, None)
    assert memory == memory_of_blocks(first, 1000)
    assert memory.logits == LIMITS.max_batch_tokens * 64 * 4
    # A given number of bytes is divided as the layers are: a quarter for the first stage.
    assert plan_stage_memory([first, last], 80 * GB, 500 * 4 * BLOCK_BYTES).blocks == 500
    # A part of each GPU's memory holds fewer blocks of the stage with more layers.
    assert plan_stage_memory([first, last], 100 * 3 * 600 * BLOCK_BYTES, None, kv_memory=0.01).blocks == 600
    with pytest.raises(OptionError, match=r"free and the stage's share of kv_cache_bytes, 1\n"):
        plan_stage_memory([first, last], 80 * GB, 1)
    with pytest.raises(OptionError, match=r"max_model_len=4096 .* \+ rows for the next stage and inputs "):
        plan_stage_memory([first, last], RESERVED_BYTES, None)
    with pytest.raises(OptionError, match=r"max_model_len=4096 .* \+ logits and inputs ") as error:
        plan_stage_memory([first, last], of_last.fixed + RESERVED_BYTES + PER_SEQUENCE * BLOCK_BYTES, None)
    assert error.value.at == "the GPU's memory in stage 1"


def test_states_have_a_slot_for_each_sequence_and_one_for_padding() -> None:
    stateless = plan_device_memory(program(), 80 * GB, None)
    states = StateSlot((4, 1000)), StateSlot((8, 2, 500))
    memory = plan_device_memory(replace(program(), states=states), 80 * GB, None, state_cache_bytes=0)
    assert memory.states == (LIMITS.max_sequences + 1) * 4 * (4 * 1000 + 8 * 2 * 500)
    # And 24 requests' slots among a step's inputs.
    assert memory.fixed == stateless.fixed + memory.states + 128
    assert " + states 1.20 MB + KV cache " in memory.arithmetic()


def test_snapshots_of_states_have_slots_before_that_for_padding() -> None:
    recurrent = replace(program(), states=(StateSlot((4, 1000)),))
    memory = plan_device_memory(recurrent, 80 * GB, None)
    assert memory.snapshots == 4 * LIMITS.max_sequences and memory.slots == 5 * LIMITS.max_sequences
    assert memory.states == (memory.slots + 1) * memory.state
    assert plan_device_memory(recurrent, 80 * GB, None, state_cache_bytes=7 * 16_000 + 1).snapshots == 7
    # Where little is left they take a tenth of it, and the cache of keys and values still holds a sequence.
    of_blocks = memory_of_blocks(recurrent, PER_SEQUENCE)
    tight = plan_device_memory(recurrent, RESERVED_BYTES + of_blocks.fixed + of_blocks.cache + 30 * 16_000, None)
    assert (tight.snapshots, tight.blocks >= PER_SEQUENCE) == (3, True)
    with pytest.raises(OptionError, match=r"states 80\.\d+ GB \(5000000 snapshots among them\)") as error:
        plan_device_memory(recurrent, 80 * GB, None, state_cache_bytes=80 * GB)
    assert "state_cache_bytes" in str(error.value.fix)


def test_out_of_memory_names_who_asked_and_what_to_lower() -> None:
    error = out_of_memory("layer 3's KV cache", "asked for 2.000 GB", GB, 80 * GB, "weights 16.00 GB + …")
    assert "layer 3's KV cache asked for 2.000 GB, 1.000 of 80.000 GB are free" in error.problem
    assert "kv_cache_bytes" in str(error.fix)
