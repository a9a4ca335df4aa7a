"""What loggers are told. pytest's own plugin for that is off: it looks through all loggers six times a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO


@contextmanager
def logged_text(name: str) -> Iterator[StringIO]:
    """A text that grows by what the logger, and those below it that pass on, are told, tracebacks and all."""
    text, logger = StringIO(), logging.getLogger(name)
    handler = logging.StreamHandler(text)
    logger.addHandler(handler)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
