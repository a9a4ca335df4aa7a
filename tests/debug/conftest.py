"""One built engine for all tests that look into engines."""

from __future__ import annotations

from pathlib import Path

import pytest

MODEL = Path(__file__).parent.parent.parent / "examples" / "models" / "bard-draft"


@pytest.fixture(scope="session")
def draft_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped two-layer model for this machine's CPU."""
    # Not above: this file is loaded before tests/conftest.py says that Triton's kernels are interpreted.
    from llmc.compiler import build

    path = tmp_path_factory.mktemp("debug") / "draft.llmc"
    build(MODEL, path, max_model_len=256)
    return path
