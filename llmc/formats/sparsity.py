"""Sparsity as data: what `--sparsity` spells, which weights it is for, and what each spelling means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from llmc.errors import OptionError
from llmc.formats.module_rules import matches_module, split_rule

Method = Literal["magnitude", "wanda", "sparsegpt"]

NOT_SPARSE = "none"
METHODS: tuple[Method, ...] = ("magnitude", "wanda", "sparsegpt")
# Those that look at data.
CALIBRATED: frozenset[Method] = frozenset({"wanda", "sparsegpt"})
PATTERNS = ((2, 4), (4, 8))


@dataclass(frozen=True)
class SparseScheme:
    """Which elements of one weight become zero.

    name: as spelled. method: how they are chosen. ratio: the share of zeros. pattern: (kept, of) neighbouring columns
    of a row, such as (2, 4); None: any.
    """

    name: str
    method: Method
    ratio: float
    pattern: tuple[int, int] | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether it takes text to run the model on."""
        return self.method in CALIBRATED

    @property
    def damping(self) -> float:
        """Of SparseGPT's Hessian: added to its diagonal, as a share of that's mean."""
        return 0.01

    @property
    def act_order(self) -> bool:
        """SparseGPT takes columns as they lie, so that patterns are of neighbours."""
        return False


@dataclass(frozen=True)
class SparseRule:
    """scheme: for modules whose dotted name, or the end of it after a dot, matches the glob pattern; None: none."""

    pattern: str
    scheme: SparseScheme | None


@dataclass(frozen=True)
class Sparsity:
    """What the option `sparsity` says. default: of every product but the output projection; of rules the last one that
    matches counts."""

    default: SparseScheme | None
    rules: tuple[SparseRule, ...]

    @property
    def is_none(self) -> bool:
        """Whether nothing is made sparse."""
        return not self.schemes

    @property
    def schemes(self) -> tuple[SparseScheme, ...]:
        """Every scheme that is named."""
        return tuple(s for s in (self.default, *(rule.scheme for rule in self.rules)) if s is not None)

    @property
    def needs_calibration(self) -> bool:
        """Whether it takes text to run the model on."""
        return any(scheme.needs_calibration for scheme in self.schemes)

    def rule_for(self, module: str) -> SparseRule | None:
        """The rule that decides on a module, None if the default does."""
        return next((rule for rule in reversed(self.rules) if matches_module(rule.pattern, module)), None)


def parse_sparsity(items: Iterable[str]) -> Sparsity:
    """Items as in `("sparsegpt:0.5", "lm_head=magnitude:2:4", "*.down_proj=none")`. Raises OptionError."""
    default: SparseScheme | None = None
    rules: list[SparseRule] = []
    seen: str | None = None
    for item in items:
        pattern, text = split_rule(item)
        if pattern is not None:
            rules.append(SparseRule(pattern, parse_sparse_scheme(text)))
            continue
        if seen is not None:
            raise OptionError(
                f"two schemes for everything, {seen} and {item}",
                at=f"sparsity={seen},{item}",
                fix=f"say which modules the second is for, such as down_proj={item}",
            )
        seen, default = item, parse_sparse_scheme(item)
    return Sparsity(default, tuple(rules))


def parse_sparse_scheme(text: str) -> SparseScheme | None:
    """The scheme that a text such as `wanda:2:4` or `sparsegpt:0.5` names, None for `none`. Raises OptionError."""
    name, *words = text.split(":")
    if name == NOT_SPARSE and not words:
        return None
    method = next((each for each in METHODS if each == name), None)
    if method is None:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise OptionError(
            f"unknown way to choose zeros {name!r}",
            at=f"sparsity={text}",
            fix=f"{hint}known: {', '.join(METHODS)} and none, as in {METHODS[0]}:0.5",
        )
    if len(words) == 2:
        kept, of = _pattern(text, words)
        return SparseScheme(text, method, 1 - kept / of, (kept, of))
    return SparseScheme(text, method, _ratio(text, words))


def _pattern(text: str, words: list[str]) -> tuple[int, int]:
    found = next((pattern for pattern in PATTERNS if [str(n) for n in pattern] == words), None)
    if found is None:
        raise OptionError(
            f"{':'.join(words)} is no pattern of zeros that llmc makes",
            at=f"sparsity={text}",
            fix=f"patterns: {', '.join(f'{kept}:{of}' for kept, of in PATTERNS)}; or a ratio, such as 0.5",
        )
    return found


def _ratio(text: str, words: list[str]) -> float:
    try:
        ratio = float(words[0]) if len(words) == 1 else float("nan")
    except ValueError:
        ratio = float("nan")
    if not 0.0 < ratio < 1.0:
        raise OptionError(
            f"{text!r} has no ratio of zeros between 0 and 1",
            at=f"sparsity={text}",
            fix=f"such as {text.partition(':')[0]}:0.5; or a pattern, such as {text.partition(':')[0]}:2:4",
        )
    return ratio
