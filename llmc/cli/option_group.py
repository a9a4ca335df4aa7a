"""Options that several verbs share: a dataclass parameter becomes one option per field."""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args, get_type_hints


def expand_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb in the form that Typer expects, with plain options in place of groups. A group's fields are annotated
    and have defaults like options.

    A group with an attribute `panel` has its options under that heading in the help.
    """
    signature = inspect.signature(verb, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }
    parameters = [
        option
        for name, parameter in signature.parameters.items()
        for option in (_options(groups[name]) if name in groups else (parameter.replace(kind=Parameter.KEYWORD_ONLY),))
    ]

    @functools.wraps(verb)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        verb(**given)

    described: Any = call
    described.__signature__ = Signature(parameters)
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def changed_options(group: Any) -> tuple[str, ...]:
    """The options of a group that differ from their defaults, as spelled on the command line."""
    changed = (field.name for field in fields(group) if (getattr(group, field.name) or None) != (field.default or None))
    return tuple(f"--{name.replace('_', '-')}" for name in changed)


def _options(group: type[Any]) -> tuple[Parameter, ...]:
    hints = get_type_hints(group, include_extras=True)
    panel: str | None = getattr(group, "panel", None)
    return tuple(
        Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=_under(panel, hints[field.name])
        )
        for field in fields(group)
    )


def _under(panel: str | None, annotation: Any) -> Any:
    """The option's annotation, with the heading that it has in the help."""
    if panel is None:
        return annotation
    kind, option = get_args(annotation)
    described = copy.copy(option)
    described.rich_help_panel = panel
    return Annotated[kind, described]
