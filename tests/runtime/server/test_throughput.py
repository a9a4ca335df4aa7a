"""The server's log says how fast it is while it works, and nothing while it does not."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from llmc.runtime.loading import load
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.server.throughput import LOGGER, log_throughput
from tests.logged_text import logged_text
from tests.runtime.async_clients import PROMPTS, listen, request, serving
from tests.runtime.tiny_engine import write_tiny_engine


def test_a_line_comes_when_the_engine_has_worked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(LOGGER), "level", logging.INFO)

    async def run() -> str:
        with logged_text(LOGGER) as log:
            async with serving(load(write_tiny_engine(tmp_path / "tiny.llmc"))) as engine:
                logging_it = asyncio.create_task(log_throughput(engine, "replica 1", seconds=0.005))
                await asyncio.sleep(0.05)
                assert not log.getvalue(), "it has done nothing"
                await listen(engine, request("one", PROMPTS[0], SamplingParams(max_tokens=9)))
                while not log.getvalue():
                    await asyncio.sleep(0.001)
                logging_it.cancel()
            return log.getvalue()

    line = asyncio.run(run()).splitlines()[0]
    assert line.startswith("replica 1: ") and " generated tok/s, " in line and " prompt tok/s; " in line
    assert "of the KV cache in use" in line
