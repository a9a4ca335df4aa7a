"""Options that say something of each weight: `WHAT` for all, `PATTERN=WHAT` for some, by names in the checkpoint."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Generic, Protocol, TypeVar

from llmc.errors import OptionError


class LooksAtData(Protocol):
    """A scheme that may need calibration. needs_calibration: whether it needs text to run the model on."""

    @property
    def needs_calibration(self) -> bool: ...


S = TypeVar("S")
SchemeT = TypeVar("SchemeT", bound=LooksAtData)
BudgetT = TypeVar("BudgetT")


@dataclass(frozen=True)
class Rule(Generic[S]):
    """A rule that gives modules a scheme. scheme: for modules whose dotted name, or the end of it after a dot, matches
    the glob pattern; None: none."""

    pattern: str
    scheme: S | None

    def matches(self, module: str) -> bool:
        """Whether the rule is for a module, such as `model.layers.0.mlp.down_proj`."""
        return fnmatchcase(module, self.pattern) or fnmatchcase(module, f"*.{self.pattern}")


@dataclass(frozen=True)
class BudgetedSchemes(Generic[SchemeT, BudgetT]):
    """The schemes of modules, with a default or a budget for the others. default: the scheme of every product's weight
    that no rule is for; None leaves it alone. budget: the budget from which each of these weights gets its own scheme
    instead of a default."""

    default: SchemeT | None
    rules: tuple[Rule[SchemeT], ...]
    budget: BudgetT | None = None

    @property
    def is_none(self) -> bool:
        """Whether all weights are left alone."""
        return not self.schemes and self.budget is None

    @property
    def is_for_all(self) -> bool:
        """Whether it says something of weights that no rule is for."""
        return self.default is not None or self.budget is not None

    @property
    def schemes(self) -> tuple[SchemeT, ...]:
        """Every scheme that is named."""
        return tuple(s for s in (self.default, *(rule.scheme for rule in self.rules)) if s is not None)

    @property
    def needs_calibration(self) -> bool:
        """Whether it takes text to run the model on."""
        return self.budget is not None or any(scheme.needs_calibration for scheme in self.schemes)

    def rule_for(self, *names: str) -> Rule[SchemeT] | None:
        """The rule that decides on a module of these names, the last one that matches; None if the default does.
        Earlier names go first."""
        return next((rule for name in names for rule in reversed(self.rules) if rule.matches(name)), None)


# Whatever their budget is.
ModuleSchemes = BudgetedSchemes[SchemeT, Any]


def split_items(
    items: Iterable[str], option: str, parse: Callable[[str], S | None]
) -> tuple[str | None, tuple[Rule[S], ...]]:
    """The item that is for everything, if there is one, and the rules of the others. Raises OptionError for a second
    one for everything."""
    rules: list[Rule[S]] = []
    seen: str | None = None
    for item in items:
        pattern, text = split_rule(item)
        if pattern == "":
            raise OptionError(
                f"{item!r} names no weights before its equals sign", at=f"{option}={item}", fix=f"such as lm_head{item}"
            )
        if pattern is not None:
            rules.append(Rule(pattern, _parsed(item, text, option, parse)))
            continue
        if seen is not None:
            raise OptionError(
                f"two schemes for all weights, {seen} and {item}",
                at=f"{option}={seen},{item}",
                fix=f"name the modules that the second applies to, such as lm_head={item}",
            )
        seen = item
    return seen, tuple(rules)


def _parsed(item: str, text: str, option: str, parse: Callable[[str], S | None]) -> S | None:
    """Parse the value of a rule; errors name its pattern."""
    try:
        return parse(text)
    except OptionError as error:
        raise OptionError(error.problem, at=f"{option}={item}", fix=error.fix) from None


def number_of(text: str) -> float:
    """The number in an option's text; NaN, which is in no range, if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def split_rule(item: str) -> tuple[str | None, str]:
    """(pattern, what): an equals sign before the first colon makes a rule, later ones belong to options."""
    head, equals, rest = item.partition("=")
    return (head, rest) if equals and ":" not in head else (None, item)
