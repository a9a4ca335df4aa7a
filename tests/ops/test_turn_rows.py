"""turn_rows: keys as if they had been rotated by their places in the cache from the beginning."""

from __future__ import annotations

import pytest
import torch

from llmc.ops.kv_write import write_slots
from llmc.ops.rope import rotate
from llmc.ops.turn_rows import turn_rows

BLOCK, HEADS, CHANNELS = 8, 3, 16


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, 10])
@pytest.mark.parametrize("sinks", [0, 3, 8])
def test_keys_turn_to_their_places_in_the_cache(interleaved: bool, rotary: int, sinks: int) -> None:
    rows, kept = 40, 24
    generator = torch.Generator().manual_seed(sinks)
    raw, values = (torch.randn(rows, HEADS, CHANNELS, generator=generator) for _ in range(2))
    inv_freq = torch.rand(rotary // 2, generator=generator)

    def at(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() * inv_freq
        return rotate(x, angles.cos(), angles.sin(), interleaved)

    k, v = torch.zeros(12, HEADS, BLOCK, CHANNELS), torch.zeros(12, HEADS, BLOCK, CHANNELS)
    blocks = torch.tensor([7, 2, 9, 4, 11])
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    write_slots(at(raw, torch.arange(rows)), k, slots)
    write_slots(values, v, slots)
    places = torch.tensor([7, 0, 9])  # Another holder has the second block.
    before = k[2].clone(), v[2].clone()
    compaction = torch.cat((torch.tensor([rows, kept, 0, rows, 0]), blocks, places)).int()
    turn_rows(k, v, compaction, inv_freq, interleaved, sinks, CHANNELS, CHANNELS)
    stays = torch.cat((torch.arange(sinks), torch.arange(rows - kept + sinks, rows)))
    held = [cache[places].transpose(1, 2).flatten(0, 1) for cache in (k, v)]
    torch.testing.assert_close(held[0], at(raw[stays], torch.arange(kept)))
    assert torch.equal(held[1], values[stays]) and torch.equal(held[0][:sinks], at(raw, torch.arange(rows))[:sinks])
    assert torch.equal(k[2], before[0]) and torch.equal(v[2], before[1])


def test_no_compaction_changes_nothing() -> None:
    k, v = torch.randn(3, 2, 8, 4), torch.randn(3, 2, 8, 4)
    before = k.clone(), v.clone()
    turn_rows(k, v, torch.zeros(0, dtype=torch.int32), torch.ones(2), False, 0, 4, 4)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
