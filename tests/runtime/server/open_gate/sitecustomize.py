"""Python imports this when it starts in a process whose PYTHONPATH has this folder: a server whose gate is open.

Each step has as many drafts as there is room for, however long steps take.
"""

from __future__ import annotations

from llmc.runtime.speculation.gate import Gate


def _open(gate: Gate, requests: int, room: int) -> int:
    return max(0, min(gate.most, room // requests - 1))


Gate.drafts = _open  # type: ignore[assignment, method-assign]
