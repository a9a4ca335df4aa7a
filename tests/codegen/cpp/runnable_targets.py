"""The CPU targets that this machine can run: kernels are tested for all of them."""

from __future__ import annotations

import pytest

from llmc.targets import CPU_TARGETS, missing_features

RUNNABLE = tuple(target for target in CPU_TARGETS if not missing_features(target))
# The kernels of codes take a minute to compile for each target. Those of the targets in between have no code that these
# do not have too, apart from the width of vectors.
_QUICK = (RUNNABLE[0].name, "cpu-x86-64-v3", "cpu-portable")
CODED = tuple(
    pytest.param(target, marks=() if target.name in _QUICK else pytest.mark.slow, id=target.name) for target in RUNNABLE
)
