"""Values of --speculative-config: the allowed values of fields, and reading them into a dataclass."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from llmc.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OPTION = "--speculative-config"
# Keys of every method, in addition to its own.
SHARED_KEYS = ("method", "rejection_sample_method", "draft_sample_method", "posterior_threshold", "posterior_alpha")
Config = TypeVar("Config", bound="DataclassInstance")


def number(low: int, high: int, default: float | None = None) -> Any:
    """A field for a number in this range, whole if the field's type is int. default: None if the field is required."""
    return field(default=MISSING if default is None else default, metadata={"low": low, "high": high})


def text() -> Any:
    """A field for a path or a name."""
    return field(metadata={"example": '"draft.llmc"'})


def read_values(kind: type[Config], values: Mapping[str, Any], method: str) -> Config:
    """The dataclass of a method. Raises OptionError for values that are missing, unknown or out of range."""
    known = {declared.name: declared for declared in fields(kind) if declared.metadata}
    for name in values:
        if name not in known:
            keys = (*known, *SHARED_KEYS)
            fix = did_you_mean(name, keys).rstrip() or f"its keys are {', '.join(keys)}"
            raise OptionError(f"the method {method!r} has no key {name!r:.80}", at=OPTION, fix=fix)
    for name, config_field in known.items():
        if name in values:
            check_value(config_field, values[name])
        elif config_field.default is MISSING:
            example = config_field.metadata.get("example", "4")
            raise OptionError(f"the method {method!r} needs {name}", at=OPTION, fix=f'add "{name}": {example}')
    return kind(**values)


def check_value(field: Field[Any], value: Any) -> None:
    """Raises OptionError if the field does not accept the value."""
    if "example" in field.metadata:
        if not isinstance(value, str) or not value:
            raise OptionError(f"{field.name} cannot be {value!r:.80}", at=OPTION, fix="give a path")
        return
    low, high = field.metadata["low"], field.metadata["high"]
    is_whole = field.type in (int, "int")
    is_number = type(value) is int or (type(value) is float and not is_whole)
    if not is_number or not low <= value <= high:
        expected = "a whole number" if is_whole else "a number"
        raise OptionError(
            f"{field.name} cannot be {value!r:.80}", at=OPTION, fix=f"give {expected} from {low} to {high}"
        )
