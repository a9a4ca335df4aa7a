"""Python imports this when it starts in a process whose PYTHONPATH has this folder: a server whose executor can break.

A step that reads the token id that $FAILING_TOKEN names raises, as a device that is lost does.
"""

from __future__ import annotations

import os
from typing import Any


def _break(token: int) -> None:
    from llmc.runtime.executors.cpp import ChoosingCppExecutor, CppExecutor

    CppExecutor.step = _breaking(CppExecutor.step, token)  # type: ignore[method-assign]
    ChoosingCppExecutor.choose = _breaking(ChoosingCppExecutor.choose, token)  # type: ignore[method-assign]


def _breaking(real: Any, token: int) -> Any:
    def broken(executor: Any, step: Any, *given: Any) -> Any:
        if token in step.input_ids:
            raise RuntimeError("the device fell off the bus")
        return real(executor, step, *given)

    return broken


if "FAILING_TOKEN" in os.environ:
    _break(int(os.environ["FAILING_TOKEN"]))
