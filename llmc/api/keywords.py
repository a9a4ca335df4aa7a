"""Show `**options: Unpack[SomeTypedDict]` to inspect, help() and interactive completion as the keywords that it stands
for. Type checkers read the TypedDict themselves."""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from typing import Any, ForwardRef, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def shows_keywords(keywords: type, defaults: Mapping[str, Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for a function that takes `**name: Unpack[keywords]`; its signature lists them, with defaults."""

    def expand(function: Callable[P, R]) -> Callable[P, R]:
        shown: Any = function
        shown.__signature__ = expanded(function, keywords, defaults)
        return function

    return expand


def expanded(function: Callable[..., Any], keywords: type, defaults: Mapping[str, Any]) -> Signature:
    """The function's signature with the names of a TypedDict in place of its `**`."""
    shown = signature(function)
    own = [p for p in shown.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    more = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=kind.__forward_arg__ if isinstance(kind, ForwardRef) else kind,
        )
        for name, kind in keywords.__annotations__.items()
    ]
    return shown.replace(parameters=[*own, *more])


def shows_fields(cls: C) -> C:
    """A decorator for a dataclass whose `__new__` takes anything: its signature is that of its `__init__`."""
    shown: Any = cls
    shown.__signature__ = Signature(list(signature(shown.__init__).parameters.values())[1:])
    return cls
