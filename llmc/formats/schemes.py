"""Quantization schemes as data. `scheme_text` reads them from the option `--quantize`."""

from dataclasses import dataclass, replace
from typing import Literal

from llmc.formats.code_format import CODE_FORMATS, TOKEN_GROUP, Activation, CodeFormat, Granularity
from llmc.formats.module_rules import BudgetedSchemes

Method = Literal["rtn", "gptq", "awq", "smoothquant"]

NOT_QUANTIZED = "none"
BLOCK = 128
# Sizes of groups, the largest first: one that is not named is the first of them that divides a weight's columns.
GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class TokenDefault:
    """How a target rounds tokens where neither a scheme nor a checkpoint says so.

    Args:
        group: Channels of a token that share a scale, in schemes that round tokens to int8; None for all channels.
        rounds_plain: Whether schemes and stored codes that multiply unrounded tokens round them too, because such
            products are faster. An engine in float32 never does.
    """

    group: int | None = TOKEN_GROUP
    rounds_plain: bool = False

    def in_dtype(self, dtype: str) -> "TokenDefault":
        """The default of engines in a dtype, as the option `dtype` spells it."""
        return replace(self, rounds_plain=self.rounds_plain and dtype != "float32")


DEFAULT_TOKENS = TokenDefault()


@dataclass(frozen=True)
class Scheme:
    """How one weight is quantized.

    name: as spelled. format: the format of the weight's codes (ops/weight_codes.py). granularity: what shares a scale:
    the tensor, a channel (row), a group of `group` columns in a row, or a block of 128 × 128. is_group_named: whether
    the user chose the group; else it is the largest that there may be (`fitted`). run: columns that share a float, of a
    format whose scales have steps, if the user chose it. activation: what the tokens are rounded to, each with its own
    scale, one for each token_group of its channels, or one found by calibration if is_static. follows_target: the
    option names no rounding of tokens, so that the target chooses (`on_target`). method: how weights are rounded, or
    prepared for it. act_order, damping: options of GPTQ. alpha: the exponent of SmoothQuant.
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
        """The number of columns that share a scale; None for all."""
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

    def on_target(self, tokens: TokenDefault) -> "Scheme":
        """The scheme with the target's default for tokens, if it names none: int8 with a scale per group."""
        if not self.follows_target or self.is_static or tokens.group is None:
            return self
        if self.activation == "none" and not tokens.rounds_plain:
            return self
        name = f"{self.name}:x{tokens.group}"
        return replace(self, name=name, activation="int8", token_group=tokens.group, follows_target=False)

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
        """Return further schemes: all blocked formats with no fewer bits per code than the first of `schemes`."""
        least = self.schemes[0].code_bits
        return tuple(
            self._rounded(name) for name, codes in CODE_FORMATS.items() if codes.is_blocked and codes.bits >= least
        )

    def _rounded(self, base: str) -> Scheme:
        return SCHEMES[base if self.method == "rtn" else f"{base}-{self.method}"]


# The parsed value of the option `quantize`.
Quantization = BudgetedSchemes[Scheme, Budget]


def on_target(quantization: Quantization, tokens: TokenDefault) -> Quantization:
    """Give schemes without a rounding of tokens the target's default; see Scheme.on_target."""
    default = quantization.default and quantization.default.on_target(tokens)
    rules = (replace(rule, scheme=rule.scheme and rule.scheme.on_target(tokens)) for rule in quantization.rules)
    return replace(quantization, default=default, rules=tuple(rules))
