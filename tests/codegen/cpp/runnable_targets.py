"""The CPU targets that this machine can run: kernels are tested for all of them."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from llmc.targets import CPU_TARGETS, missing_features

_HERE = tuple(target for target in CPU_TARGETS if not missing_features(target))
# Compiling takes half a minute for each target, and a minute for its kernels of codes. The quick tests compile for this
# machine's best target and for AVX2, and kernels of codes for the best target only.
_PLAIN = (_HERE[0].name, "cpu-x86-64-v3")
_CODED = (_HERE[0].name,)


def _targets(quick: tuple[str, ...]) -> tuple[ParameterSet, ...]:
    return tuple(
        pytest.param(target, marks=() if target.name in quick else pytest.mark.slow, id=target.name) for target in _HERE
    )


RUNNABLE = _targets(_PLAIN)
# For the kernels of codes.
CODED = _targets(_CODED)
QUICKLY_RUNNABLE = tuple(target for target in _HERE if target.name in _PLAIN)
