"""What several files of tests look at."""

from pathlib import Path

import pytest

from llmc.architectures.tiny_config import tiny_architecture
from tests.end_to_end.test_states import HYBRID, built


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CPU engine with states and attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_architecture(HYBRID).save_pretrained(folder / "model")
    return built(folder / "model", folder / "engine.llmc", block_size=8, max_model_len=240)
