"""SIGTERM before the server listens: an orderly end, as after it."""

import signal
import sys
from types import FrameType


def end_on_sigterm() -> None:
    """Let SIGTERM end the process with 0 from now on, after all blocks are left; uvicorn's handler replaces this one.

    A model may be built or loaded for minutes before there is anything to drain.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
