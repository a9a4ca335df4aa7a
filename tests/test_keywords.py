"""What editors and type checkers see of the keywords that functions pass on: the names and defaults of their fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, signature
from typing import Any, get_type_hints

import pytest

import llmc
from llmc.engines.llm import LLM
from llmc.errors import RequestError
from llmc.options import BuildKeywords, BuildOptions
from llmc.runtime.async_engine import AsyncEngine
from llmc.runtime.engine import Engine
from llmc.runtime.sampling.sampling_keywords import SamplingKeywords, chosen_params, params_of_each
from llmc.runtime.sampling.sampling_params import SamplingParams


def test_the_keywords_are_the_build_options() -> None:
    assert list(BuildKeywords.__annotations__) == list(BuildOptions.model_fields)


@pytest.mark.parametrize("function", [llmc.compile, llmc.build, LLM])
def test_signatures_name_every_build_option(function: Callable[..., Any]) -> None:
    shown = signature(function).parameters
    for name, field in BuildOptions.model_fields.items():
        assert shown[name].kind is Parameter.KEYWORD_ONLY and shown[name].default == field.default
    assert not any(p.kind is Parameter.VAR_KEYWORD for p in shown.values())


def test_the_sampling_keywords_are_the_sampling_parameters() -> None:
    assert get_type_hints(SamplingKeywords) == get_type_hints(SamplingParams)


@pytest.mark.parametrize("owner", [Engine, LLM, AsyncEngine])
@pytest.mark.parametrize("name", ["generate", "stream", "chat", "stream_chat"])
def test_what_generates_names_every_sampling_parameter(owner: type, name: str) -> None:
    if owner is AsyncEngine and name != "generate":
        return
    shown = signature(getattr(owner, name)).parameters
    for field in fields(SamplingParams):
        assert shown[field.name].kind is Parameter.KEYWORD_ONLY
        assert shown[field.name].default == getattr(SamplingParams(), field.name)
    assert not any(p.kind is Parameter.VAR_KEYWORD for p in shown.values())


def test_the_sampling_parameters_show_their_fields() -> None:
    assert list(signature(SamplingParams).parameters) == [field.name for field in fields(SamplingParams)]


def test_parameters_are_given_once() -> None:
    params = SamplingParams(max_tokens=3)
    assert chosen_params(None, {"max_tokens": 3}) == chosen_params(params, {}) == params
    assert params_of_each(2, None, {"max_tokens": 3}) == params_of_each(2, [params, params], {}) == [params] * 2
    for given in (params, [params, params]):
        with pytest.raises(RequestError, match="max_tokens=5 was given with a SamplingParams") as caught:
            params_of_each(2, given, {"max_tokens": 5})
        assert caught.value.fix is not None and "dataclasses.replace(params, max_tokens=5)" in caught.value.fix
    with pytest.raises(RequestError, match="sampling_params is not a sampling parameter"):
        params_of_each(1, None, {"sampling_params": params})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(RequestError, match="unknown sampling parameter 'max_token'"):
        params_of_each(1, None, {"max_token": 5})  # type: ignore[typeddict-unknown-key]


def test_the_package_shows_what_it_offers() -> None:
    assert {"LLM", "compile", "build", "load", "Grammar", "GrammarKind", "SamplingParams"} <= set(dir(llmc))
    assert all(name in llmc.__all__ or name.startswith("__") for name in dir(llmc))
    assert all(getattr(llmc, name) is not None for name in dir(llmc))
