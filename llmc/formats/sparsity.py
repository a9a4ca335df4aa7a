"""Sparsity as data: what `--sparsity` spells, which weights it is for, and what each spelling means."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from llmc.errors import OptionError, did_you_mean
from llmc.formats.module_rules import BudgetedSchemes, number_of, split_items

Method = Literal["magnitude", "wanda", "sparsegpt"]

NOT_SPARSE, AUTO = "none", "auto"
METHODS: tuple[Method, ...] = ("magnitude", "wanda", "sparsegpt")
# Methods that need calibration data.
CALIBRATED: frozenset[Method] = frozenset({"wanda", "sparsegpt"})
PATTERNS = ((2, 4), (4, 8))


@dataclass(frozen=True)
class SparseScheme:
    """Which elements of one weight become zero.

    name: as spelled. method: how they are chosen. ratio: the share of zeros. pattern: (kept, of) neighbouring columns
    of a row, such as (2, 4); None: any. damping: the number that is added to the diagonal of SparseGPT's Hessian, as a
    share of the diagonal's mean. act_order: SparseGPT takes columns as they lie, so that patterns are of neighbours.
    """

    name: str
    method: Method
    ratio: float
    pattern: tuple[int, int] | None = None
    damping: ClassVar[float] = 0.01
    act_order: ClassVar[bool] = False

    @property
    def needs_calibration(self) -> bool:
        """Whether it takes text to run the model on."""
        return self.method in CALIBRATED


@dataclass(frozen=True)
class SparseBudget:
    """METHOD:auto:0.5 — that share of zeros over all weights, fewer of them in those that the output depends on."""

    method: Method
    ratio: float

    def scheme(self, ratio: float) -> SparseScheme:
        """The scheme of one weight."""
        return SparseScheme(f"{self.method}:{ratio:g}", self.method, ratio)


# The parsed value of the option `sparsity`. Default and budget exclude the output projection, which decides every
# token.
Sparsity = BudgetedSchemes[SparseScheme, SparseBudget]


def parse_sparsity(items: Iterable[str]) -> Sparsity:
    """Items as in `("sparsegpt:0.5", "lm_head=magnitude:2:4", "*.down_proj=none")`. Raises OptionError."""
    default, rules = split_items(items, "sparsity", parse_sparse_scheme)
    name, *words = (default or "").split(":")
    if default is not None and words[:1] == [AUTO]:
        method = _method(default, name)
        return Sparsity(None, rules, SparseBudget(method, _ratio(default, words[1:], f"{method}:{AUTO}:0.5")))
    return Sparsity(None if default is None else parse_sparse_scheme(default), rules)


def parse_sparse_scheme(text: str) -> SparseScheme | None:
    """The scheme that a text such as `wanda:2:4` or `sparsegpt:0.5` names, None for `none`. Raises OptionError."""
    name, *words = text.split(":")
    if name == NOT_SPARSE:
        if words:
            raise OptionError(
                f"{text!r}: {NOT_SPARSE} takes no ratio",
                at=f"sparsity={text}",
                fix=f"{NOT_SPARSE} alone, or {METHODS[0]}:{':'.join(words)}",
            )
        return None
    method = _method(text, name)
    if words[:1] == [AUTO]:
        raise OptionError(
            f"{text!r} distributes zeros among all weights, so it cannot apply to some of them",
            at=f"sparsity={text}",
            fix=f"give these a ratio, such as {name}:0.5",
        )
    if len(words) == 2:
        kept, of = _pattern(text, words)
        return SparseScheme(text, method, 1 - kept / of, (kept, of))
    return SparseScheme(text, method, _ratio(text, words, f"{method}:0.5; or a pattern, such as {method}:2:4"))


def _method(text: str, name: str) -> Method:
    method = next((candidate for candidate in METHODS if candidate == name), None)
    if method is None:
        raise OptionError(
            f"unknown way to choose zeros {name!r}",
            at=f"sparsity={text}",
            fix=f"{did_you_mean(name, METHODS)}known: {', '.join(METHODS)} and none, as in {METHODS[0]}:0.5",
        )
    return method


def _pattern(text: str, words: list[str]) -> tuple[int, int]:
    chosen = next((pattern for pattern in PATTERNS if [str(n) for n in pattern] == words), None)
    if chosen is None:
        raise OptionError(
            f"{':'.join(words)} is not a pattern of zeros that llmc supports",
            at=f"sparsity={text}",
            fix=f"patterns: {', '.join(f'{kept}:{of}' for kept, of in PATTERNS)}; or a ratio, such as 0.5",
        )
    return chosen


def _ratio(text: str, words: list[str], instead: str) -> float:
    ratio = number_of(":".join(words))
    if not 0.0 < ratio < 1.0:
        raise OptionError(
            f"{text!r} has no ratio of zeros between 0 and 1", at=f"sparsity={text}", fix=f"such as {instead}"
        )
    return ratio
