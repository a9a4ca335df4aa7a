"""What editors and type checkers see of the keywords that functions pass on: the names and defaults of their fields."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import pytest

import llmc
from llmc.options import BuildKeywords, BuildOptions


def test_the_keywords_are_the_build_options() -> None:
    assert list(BuildKeywords.__annotations__) == list(BuildOptions.model_fields)


@pytest.mark.parametrize("function", [llmc.compile, llmc.build])
def test_signatures_name_every_build_option(function: Callable[..., Any]) -> None:
    shown = signature(function).parameters
    for name, field in BuildOptions.model_fields.items():
        assert shown[name].kind is Parameter.KEYWORD_ONLY and shown[name].default == field.default
    assert not any(p.kind is Parameter.VAR_KEYWORD for p in shown.values())
