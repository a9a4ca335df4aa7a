"""The inputs of a step, by name."""

from __future__ import annotations

from llmc.program import GROUP_INPUTS, group_input
from llmc.runtime.loop.step import input_names


def test_each_group_of_caches_has_inputs_of_its_own() -> None:
    alone, both = input_names(0), input_names(2)
    assert not any("window" in name for name in alone) and {"input_ids", "slot_mapping", "block_tables"} <= alone
    assert both - alone == {group_input(name, group) for name in GROUP_INPUTS for group in (1, 2)} and alone <= both
