"""Memory that all GPUs share: a process asks for it once."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as distributed
from torch._C._distributed_c10d import TCPStore

from llmc.runtime.device import symmetric_memory
from llmc.runtime.device.symmetric_memory import can_have_symmetric_memory
from llmc.runtime.ranks.device_ranks import part_from_group


def test_a_process_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is none, as on CPUs."""
    monkeypatch.setattr(symmetric_memory, "_was_set_up", threading.Event())
    assert can_have_symmetric_memory()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert symmetric_memory.symmetric_memory(128, torch.device("cpu")) is None
    finally:
        part_from_group()
    assert not can_have_symmetric_memory()
