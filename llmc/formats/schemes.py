"""Quantization schemes as data: what `--quantize` spells, which weights it is for, and what each spelling means."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from llmc.errors import OptionError, did_you_mean
from llmc.formats.code_format import CODE_FORMATS, RUN_UNIT, TOKEN_GROUP, Activation, CodeFormat, Granularity
from llmc.formats.module_rules import BudgetedSchemes, number_of, split_items

Method = Literal["rtn", "gptq", "awq", "smoothquant"]

NOT_QUANTIZED = "none"
BLOCK = 128
# Sizes of groups, the largest first: one that is not named is the first of them that divides a weight's columns.
GROUPS = (128, 64, 32)
_GROUPS = tuple(f"g{size}" for size in reversed(GROUPS))
# Options that say what shares a scale.
SHARING = frozenset({*_GROUPS, "channel", "tensor", "block"})
# How tokens are rounded: with a scale for each group of channels, with one, or not at all.
_TOKEN_GROUP, WHOLE_TOKENS, _PLAIN_TOKENS = f"x{TOKEN_GROUP}", "xrow", "xnone"
# Options that say how tokens are rounded.
ROUNDING = frozenset({_TOKEN_GROUP, WHOLE_TOKENS, "static", "dynamic"})


@dataclass(frozen=True)
class Scheme:
    """How one weight is quantized.

    name: as spelled. format: of the weight's codes (ops/weight_codes.py). granularity: what shares a scale: the
    tensor, a channel (row), a group of `group` columns in a row, or a block of 128 × 128. is_group_named: whether the
    user chose the group; else it is the largest that there may be (`fitted`). run: columns that share a float, of a
    format whose scales have steps, if the user chose it. activation: what the tokens
    are rounded to, each with its own scale, one for each token_group of its channels, or one found by calibration if
    is_static. follows_target: the option names no rounding of tokens, so that the target chooses (`on_target`).
    method: how weights are rounded, or prepared for it. act_order, damping: of GPTQ. alpha: of SmoothQuant.
    """

    name: str
    format: str
    granularity: Granularity = "channel"
    group: int | None = None
    is_group_named: bool = False
    run: int | None = None
    symmetric: bool = True
    activation: Activation = "none"
    is_static: bool = False
    token_group: int | None = None
    follows_target: bool = False
    method: Method = "rtn"
    act_order: bool = True
    damping: float = 0.01
    alpha: float = 0.5

    @property
    def codes(self) -> CodeFormat:
        """The code format of the weight."""
        return CODE_FORMATS[self.format]

    @property
    def code_bits(self) -> int:
        """Bits of one code."""
        return self.codes.bits

    @property
    def needs_calibration(self) -> bool:
        """Whether it takes text to run the model on."""
        return self.method != "rtn" or self.is_static

    @property
    def columns(self) -> int | None:
        """How many columns share a scale; None for all."""
        return {"group": self.group, "block": BLOCK}.get(self.granularity)

    def groups(self) -> tuple["Scheme", ...]:
        """The scheme with each group size it can have, largest first; the scheme itself if its group is fixed."""
        if self.granularity != "group" or self.is_group_named or "group" not in self.codes.granularities:
            return (self,)
        sizes = [size for size in GROUPS if size <= (self.group or 0)]
        named = (replace(self, name=f"{self.name}:g{size}", group=size, is_group_named=True) for size in sizes[1:])
        return (self, *named)

    def fitted(self, columns: int) -> "Scheme | None":
        """The scheme with the largest group size that divides the columns; None if none does."""
        if not self.codes.is_blocked:
            return next((scheme for scheme in self.groups() if columns % (scheme.columns or 1) == 0), None)
        run = self.run_of(columns)
        if run is None or self.codes.steps is None or run in (self.codes.run, self.run):
            return None if run is None else self
        return replace(self, name=f"{self.name}:s{run}", run=run)

    def run_of(self, columns: int) -> int | None:
        """The number of a row's columns that share a float, for a blocked format; None if the scheme does not fit."""
        if self.run is None:
            return self.codes.run_of(columns)
        return None if columns % self.run else self.run

    def on_target(self, token_group: int | None, *, rounds_plain: bool) -> "Scheme":
        """The scheme with the target's default for tokens, if it names none: int8 with a scale per group.

        Args:
            token_group: Channels per scale; None keeps the scheme.
            rounds_plain: Whether tokens are also rounded if the scheme alone leaves them as they are.
        """
        if not self.follows_target or self.is_static or token_group is None:
            return self
        if self.activation == "none" and not rounds_plain:
            return self
        name = f"{self.name}:x{token_group}"
        return replace(self, name=name, activation="int8", token_group=token_group, follows_target=False)

    def bits(self, columns: int) -> float:
        """Bits per weight in rows of `columns` columns, including scales (16 bits per group, 32 per row), zeros, minima
        and steps.

        Values shared by blocks or by the tensor are stored with each row (ops/weight_codes.py), and count as such.
        """
        run = self.run_of(columns) if self.codes.is_blocked else None
        if run is not None:
            return self.code_bits + (16 * (1 + self.codes.has_minimum) + self.codes.step_bits(run)) / run
        scale = 32 if self.columns is None else 16
        zero = 0 if self.symmetric else self.code_bits
        return self.code_bits + (scale + zero) / (self.columns or columns)


_BASES: dict[str, Scheme] = {
    "int8": Scheme("int8", "int8"),
    "int6": Scheme("int6", "int6", "group", 128),
    "int5": Scheme("int5", "int5", "group", 128),
    "int4": Scheme("int4", "int4", "group", 128),
    "w8a8": Scheme("w8a8", "int8", activation="int8", follows_target=True),
    "w6a8": Scheme("w6a8", "int6", "group", 128, activation="int8", follows_target=True),
    "w5a8": Scheme("w5a8", "int5", "group", 128, activation="int8", follows_target=True),
    "w4a8": Scheme("w4a8", "int4", "group", 128, activation="int8", follows_target=True),
    "fp8": Scheme("fp8", "fp8"),
    "fp8-w8a8": Scheme("fp8-w8a8", "fp8", activation="fp8"),
    "nf4": Scheme("nf4", "nf4", "group", 64),
    "mxfp4": Scheme("mxfp4", "mxfp4", "group", 32),
    **{
        name: Scheme(name, name, "group", codes.group, follows_target=True)
        for name, codes in CODE_FORMATS.items()
        if codes.is_blocked
    },
}
_METHODS: dict[str, tuple[Method, ...]] = {
    "int8": ("gptq",),
    **dict.fromkeys(("int6", "int5", "int4", "w6a8", "w5a8", "w4a8"), ("gptq", "awq")),
    "w8a8": ("smoothquant", "gptq"),
    **{name: ("gptq",) for name, codes in CODE_FORMATS.items() if codes.is_blocked},
}
SCHEMES: dict[str, Scheme] = {
    name: scheme
    for base, plain in _BASES.items()
    for name, scheme in (
        (base, plain),
        *(
            # AWQ was made for codes with a zero, and ships so.
            (f"{base}-{method}", replace(plain, name=f"{base}-{method}", method=method, symmetric=method != "awq"))
            for method in _METHODS.get(base, ())
        ),
    )
}


def parse_scheme(text: str) -> Scheme | None:
    """The scheme that a text such as `int4-gptq:g64:asym` names, None for `none`. Raises OptionError."""
    name, *words = text.split(":")
    if name == NOT_QUANTIZED and not words:
        return None
    scheme = SCHEMES.get(name)
    if scheme is None:
        raise OptionError(
            f"unknown quantization scheme {name!r}",
            at=f"quantize={text}",
            fix=f"{did_you_mean(name, SCHEMES)}known: {', '.join(SCHEMES)}, auto:BITS and none",
        )
    scheme = replace(scheme, name=text)
    for word in words:
        scheme = _with_option(scheme, name, word)
    if scheme.is_static and scheme.token_group is not None:
        raise OptionError(
            "a static scale is one for all channels of all tokens",
            at=f"quantize={text}",
            fix=f"leave out static, or {_TOKEN_GROUP}",
        )
    return scheme


def _with_option(scheme: Scheme, name: str, word: str) -> Scheme:
    key, _, value = word.partition("=")
    granularities = scheme.codes.granularities
    if key in _GROUPS and "group" in granularities:
        return replace(scheme, granularity="group", group=int(key[1:]), is_group_named=True)
    for granularity in granularities:
        if key == granularity != "group":
            return replace(scheme, granularity=granularity, group=None)
    if names_run(key) and scheme.codes.steps is not None:
        return replace(scheme, run=int(key[1:]))
    if key in ("sym", "asym") and scheme.codes.integers is not None and not scheme.codes.is_blocked:
        return replace(scheme, symmetric=key == "sym")
    if key in ("static", "dynamic") and scheme.activation != "none":
        return replace(scheme, is_static=key == "static")
    if key in _token_options(scheme):
        activation: Activation = "none" if key == _PLAIN_TOKENS else "int8"
        group = TOKEN_GROUP if key == _TOKEN_GROUP else None
        return replace(scheme, activation=activation, token_group=group, follows_target=False)
    if key in ("actorder", "noactorder") and scheme.method == "gptq":
        return replace(scheme, act_order=key == "actorder")
    if key == "damp" and scheme.method == "gptq":
        return replace(scheme, damping=_share(value, word))
    if key == "alpha" and scheme.method == "smoothquant":
        return replace(scheme, alpha=_share(value, word))
    raise OptionError(
        f"{name} has no option {word!r}",
        at=f"quantize={scheme.name}",
        fix=f"options of {name}: {', '.join(_options(scheme))}",
    )


def _options(scheme: Scheme) -> tuple[str, ...]:
    options = tuple(each for g in scheme.codes.granularities for each in (_GROUPS if g == "group" else (g,)))
    options += ("s256", "s288") if scheme.codes.steps is not None else ()
    options += ("sym", "asym") if scheme.codes.integers is not None and not scheme.codes.is_blocked else ()
    options += ("static", "dynamic") if scheme.activation != "none" else ()
    options += _token_options(scheme)
    options += ("actorder", "noactorder", "damp=0.01") if scheme.method == "gptq" else ()
    options += ("alpha=0.5",) if scheme.method == "smoothquant" else ()
    return options or ("none",)


def names_run(key: str) -> bool:
    """Whether an option names the columns that share a float: whole units of them."""
    digits = key[1:]
    return key[:1] == "s" and digits.isascii() and digits.isdigit() and int(digits) % RUN_UNIT == 0 < int(digits)


def _token_options(scheme: Scheme) -> tuple[str, ...]:
    if scheme.codes.is_blocked:
        return (_TOKEN_GROUP, WHOLE_TOKENS, _PLAIN_TOKENS)
    return (_TOKEN_GROUP, WHOLE_TOKENS) if scheme.activation == "int8" else ()


def _share(text: str, word: str) -> float:
    value = number_of(text)
    if not 0.0 <= value <= 1.0:
        raise OptionError(f"{text!r} is not a number from 0.0 to 1.0", at=f"quantize=…:{word}", fix="such as 0.5")
    return value


@dataclass(frozen=True)
class Budget:
    """auto:BITS — the least sensitive weights at 4 bits, others in smaller groups, at 5, 6 or 8 bits or none, so that
    the mean is at most `bits`. method: how those below 8 bits are rounded."""

    bits: float
    method: Method

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes to choose from, without smaller groups and zeros, in ascending bits."""
        return (*(self._rounded(f"int{bits}") for bits in (4, 5, 6)), SCHEMES["int8"])

    @property
    def blocked(self) -> tuple[Scheme, ...]:
        """Further schemes, of blocked formats, in ascending bits."""
        return tuple(self._rounded(f"q{bits}_k") for bits in (4, 5, 6))

    def _rounded(self, base: str) -> Scheme:
        return SCHEMES[base if self.method == "rtn" else f"{base}-{self.method}"]


# The parsed value of the option `quantize`.
Quantization = BudgetedSchemes[Scheme, Budget]


def on_target(quantization: Quantization, token_group: int | None, *, rounds_plain: bool) -> Quantization:
    """The same schemes with the target's default for tokens where they name none; see Scheme.on_target."""
    default = quantization.default
    if default is not None:
        default = default.on_target(token_group, rounds_plain=rounds_plain)
    rules = (
        replace(rule, scheme=rule.scheme and rule.scheme.on_target(token_group, rounds_plain=rounds_plain))
        for rule in quantization.rules
    )
    return replace(quantization, default=default, rules=tuple(rules))


def parse_quantization(items: Iterable[str]) -> Quantization:
    """Items as in `("int4-gptq:g64", "lm_head=int8", "*.down_proj=none")`. Raises OptionError."""
    default, rules = split_items(items, "quantize", parse_scheme)
    if default is not None and default.partition(":")[0] == "auto":
        return Quantization(None, rules, _parse_budget(default))
    return Quantization(None if default is None else parse_scheme(default), rules)


def _parse_budget(text: str) -> Budget:
    words = text.split(":")[1:]
    bits = number_of("".join(words[:1]))
    if not 4.0 < bits <= 16.0:
        raise OptionError(
            f"{text!r} has no budget of bits per weight between 4 and 16",
            at=f"quantize={text}",
            fix="such as auto:4.5; scales count too, so 4-bit codes in groups of 128 take 4.125",
        )
    if words[1:] not in ([], ["rtn"], ["gptq"]):
        raise OptionError(
            f"auto has no option {':'.join(words[1:])!r}", at=f"quantize={text}", fix="options: gptq, rtn"
        )
    return Budget(bits, "rtn" if words[1:] == ["rtn"] else "gptq")
