"""Engines of one rank and of several of the same tiny model, and what of them is left in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmc.runtime.engine import Engine
from llmc.runtime.loading import load
from llmc.settings import settings
from tests.tiny_models import tiny_checkpoint

LIMITS: Any = {
    "max_model_len": 128,
    "max_batch_tokens": 32,
    "max_sequences": 4,
    "max_logit_rows": 32,
    "dtype": "float32",
}
NewEngine = Callable[..., Path]


@pytest.fixture(scope="session")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> NewEngine:
    """Gives the engine of a tiny Qwen3 for so many ranks, and for so many sequences, of a kind; each is built once."""
    # Not above: compiling imports Triton, and nothing has said yet that its kernels are interpreted.
    from llmc.compiler import build

    checkpoint = tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))

    @cache
    def built(ranks: int, max_sequences: int = 4, target: str = "cpu") -> Path:
        folder = tmp_path_factory.mktemp(f"of-{ranks}")
        options = {**LIMITS, "max_sequences": max_sequences}
        return build(checkpoint, folder / "engine.llmc", target=target, tensor_parallel_size=ranks, **options).path

    return built


@pytest.fixture(scope="session")
def alone(of_ranks: NewEngine) -> Iterator[Engine]:
    """The engine of one rank."""
    with load(of_ranks(1), threads=1) as engine:
        yield engine


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Sets variables that settings are read from."""

    def change(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        settings.cache_clear()

    yield change
    settings.cache_clear()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test no process that it started is there, and no memory of ranks has a name."""
    before = children()
    yield
    assert children() <= before
    assert not [file for file in Path("/dev/shm").iterdir() if "llmc" in file.name]


def children() -> set[int]:
    """Processes that this one has started."""
    return {child.pid for child in psutil.Process().children()}
