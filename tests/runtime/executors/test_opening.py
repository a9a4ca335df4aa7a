"""Which executor runs an engine, by name."""

from __future__ import annotations

from typing import get_args

import pytest

from llmc.engine_format.engine_kinds import EXECUTOR_NAMES, ExecutorName
from llmc.errors import OptionError
from llmc.runtime.executors.opening import check_executor_name


def test_names_are_those_of_executors() -> None:
    assert [check_executor_name(name) for name in EXECUTOR_NAMES] == [*get_args(ExecutorName)]
    for name in ("gpu", "", None, 3):
        with pytest.raises(OptionError, match="there is no executor") as caught:
            check_executor_name(name)
        assert "cpp" in str(caught.value.fix)
