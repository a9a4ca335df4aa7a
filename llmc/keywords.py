"""Show `**options: Unpack[SomeTypedDict]` to inspect, help() and interactive completion as the keywords that it stands
for. Type checkers read the TypedDict themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def shows_keywords(keywords: type, defaults: Mapping[str, Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for a function that takes `**name: Unpack[keywords]`; its signature lists them, with defaults."""

    def expand(function: Callable[P, R]) -> Callable[P, R]:
        function.__signature__ = expanded(function, keywords, defaults)  # type: ignore[attr-defined]
        return function

    return expand


def expanded(function: Callable[..., Any], keywords: type, defaults: Mapping[str, Any]) -> Signature:
    """The function's signature with the names of a TypedDict in place of its `**`."""
    shown = signature(function)
    own = [p for p in shown.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    more = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in keywords.__annotations__.items()
    ]
    return shown.replace(parameters=[*own, *more])
