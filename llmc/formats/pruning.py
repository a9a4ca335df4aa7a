"""Structured pruning as data: what `--prune` spells, and how much of each part of a model it takes out."""

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from llmc.errors import OptionError
from llmc.formats.module_rules import Rule, number_of, split_rule

Kind = Literal["channels", "heads"]
KINDS: tuple[Kind, ...] = ("channels", "heads")
LAYERS = "layers"
VALUES, VALUE_RANK = "values", "value_rank"
_NOTHING = "none"


@dataclass(frozen=True)
class Pruning:
    """The parts of a model to remove. channels: the share of each MLP's inner channels to remove. heads: the share of
    each attention's KV heads, with their query heads. layers: number of layers to remove. values: the share of all
    value channels to remove. value_rank: number of value channels that each KV head keeps; 0 leaves it to `values`.
    rules: other shares, or None, by module names; the last matching rule counts."""

    channels: float = 0.0
    heads: float = 0.0
    layers: int = 0
    values: float = 0.0
    value_rank: int = 0
    rules: tuple[Rule[float], ...] = ()

    @property
    def is_none(self) -> bool:
        """Whether nothing is taken out."""
        return self.layers == 0 and not self.takes_values and not any(map(self.takes, KINDS))

    @property
    def takes_values(self) -> bool:
        """Whether value channels may go."""
        return self.values > 0 or self.value_rank > 0

    def takes(self, kind: Kind) -> bool:
        """Whether any of that kind may go."""
        return self.ratio_of_all(kind) > 0 or any(rule.scheme for rule in self.rules)

    def ratio_of_all(self, kind: Kind) -> float:
        """The share for modules without a rule."""
        return self.channels if kind == "channels" else self.heads

    def rule_for(self, modules: Collection[str]) -> Rule[float] | None:
        """The rule that decides on what has these weights."""
        return next((rule for rule in reversed(self.rules) if any(map(rule.matches, modules))), None)

    def ratio(self, kind: Kind, modules: Collection[str]) -> float:
        """The share of channels or heads that goes where these are the weights."""
        rule = self.rule_for(modules)
        return self.ratio_of_all(kind) if rule is None else rule.scheme or 0.0

    def keeps_layer(self, modules: Collection[str]) -> bool:
        """Whether a layer of these weights has to stay: rules leave every one of them alone."""
        rules = [self.rule_for([module]) for module in modules]
        return bool(rules) and all(rule is not None and rule.scheme is None for rule in rules)


def parse_pruning(items: Iterable[str]) -> Pruning:
    """Items as in `("channels=0.125", "heads=0.25", "layers=2", "values=0.5", "*.layers.0.*=none")`. Raises
    OptionError."""
    pruning, seen = Pruning(), set[str]()
    for item in items:
        name, text = split_rule(item)
        if not name:
            raise OptionError(
                f"{item!r} does not name what to remove",
                at=f"prune={item}",
                fix="such as channels=0.125, heads=0.25 or layers=2",
            )
        if name in seen:
            raise OptionError(f"{name} is given twice", at=f"prune={item}", fix="leave one of them out")
        seen.add(name)
        if name == LAYERS:
            pruning = replace(pruning, layers=_count(item, text, "layers", 2))
        elif name == VALUE_RANK:
            pruning = replace(pruning, value_rank=_count(item, text, "channels", 64))
        elif name == VALUES:
            pruning = replace(pruning, values=_ratio(item, text))
        elif name == "channels":
            pruning = replace(pruning, channels=_ratio(item, text))
        elif name == "heads":
            pruning = replace(pruning, heads=_ratio(item, text))
        else:
            _check_name(item, name)
            ratio = None if text == _NOTHING else _ratio(item, text)
            pruning = replace(pruning, rules=(*pruning.rules, Rule(name, ratio)))
    if pruning.values and pruning.value_rank:
        raise OptionError(
            f"values={pruning.values:g} and value_rank={pruning.value_rank} both say how many value channels stay",
            at="prune",
            fix="leave one of them out",
        )
    return pruning


def _check_name(item: str, name: str) -> None:
    """A pattern that looks like a kind is one that is misspelled."""
    near = difflib.get_close_matches(name, (*KINDS, LAYERS, VALUES, VALUE_RANK), n=1, cutoff=0.75)
    if near and name.replace("_", "").isalpha():
        raise OptionError(
            f"{name!r} is not a part that can be removed from a model",
            at=f"prune={item}",
            fix=f"did you mean {near[0]}? A pattern of names has dots or asterisks, such as *{name}",
        )


def _ratio(item: str, text: str) -> float:
    ratio = number_of(text)
    if not 0.0 < ratio < 1.0:
        raise OptionError(
            f"{text!r} is not a share between 0 and 1 that leaves something",
            at=f"prune={item}",
            fix=f"such as {item.partition('=')[0]}=0.125",
        )
    return ratio


def _count(item: str, text: str, things: str, example: int) -> int:
    if not text.isdecimal() or int(text) < 1:
        fix = f"such as {item.partition('=')[0]}={example}"
        raise OptionError(f"{text!r} is not a number of {things}", at=f"prune={item}", fix=fix)
    return int(text)
