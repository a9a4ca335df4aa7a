"""Slots of adapters: held while somebody has them, the one idle longest goes first, and none is ever lost."""

from __future__ import annotations

import random

from llmc.runtime.adapters.placed_adapter import PlacedAdapter
from llmc.runtime.scheduling.adapter_slots import AdapterSlots


def adapters(count: int) -> list[PlacedAdapter]:
    return [PlacedAdapter(f"a{i}", f"{i:064x}", "", ()) for i in range(count)]


def test_the_one_idle_longest_goes_first() -> None:
    a, b, c = adapters(3)
    slots = AdapterSlots(2)
    for adapter in (a, b):
        slots.hold(adapter)
    assert not slots.fits(c) and slots.fits(a)
    slots.release(b)
    slots.release(a)
    assert slots.held == 0
    slots.hold(c)
    assert [(slot, adapter.name) for slot, adapter in slots.take_writes()] == [(0, "a0"), (1, "a1"), (1, "a2")]
    slots.hold(a)
    assert (slots.take_writes(), slots.number(a), slots.number(c), slots.number(None)) == ([], 1, 2, 0)


def test_no_slot_is_lost_or_given_twice() -> None:
    random_, known, slots = random.Random(3), adapters(9), AdapterSlots(4)
    held: list[PlacedAdapter] = []
    contents: dict[int, PlacedAdapter] = {}
    for _ in range(5000):
        adapter = random_.choice(known)
        if random_.random() < 0.5 and slots.fits(adapter):
            slots.hold(adapter)
            held.append(adapter)
        elif held:
            slots.release(held.pop(random_.randrange(len(held))))
        contents |= dict(slots.take_writes())
        assert all(contents[slots.number(each) - 1] is each for each in held)
        assert slots.held == len(set(held)) <= 4
    for adapter in held:
        slots.release(adapter)
    for adapter in known[:4]:
        assert slots.fits(adapter)
        slots.hold(adapter)
    assert slots.held == 4 and not slots.fits(known[5])
