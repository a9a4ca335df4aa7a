"""Models that are captured once for all tests of files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from llmc.frontends.captured import Captured


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Captured]:
    """`captured(family)`: a tiny model in fp32, with states if it is none of the families that are listed."""
    # Not above: capturing imports Triton, and nothing has said yet that its kernels are interpreted.
    from llmc.architectures.tiny_config import tiny_architecture
    from llmc.frontends.capture import capture
    from llmc.options import BuildOptions
    from tests.tiny_models import FAMILIES, SPECIAL, saved, tiny_model

    @cache
    def found(family: str) -> Captured:
        sizes = {} if family == "gpt2" else {"intermediate_size": 128}
        is_listed = family in FAMILIES or family in SPECIAL
        model = tiny_model(family, **sizes) if is_listed else tiny_architecture(family)
        return capture(saved(model, tmp_path_factory.mktemp(family)), BuildOptions(dtype="float32"))

    return found
