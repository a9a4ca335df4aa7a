"""The spelling of `--quantize`: a scheme with its options, rules for some weights, or a budget of bits."""

from collections.abc import Iterable
from dataclasses import replace

from llmc.errors import OptionError, did_you_mean
from llmc.formats.code_format import RUN_UNIT, TOKEN_GROUP, Activation
from llmc.formats.module_rules import number_of, split_items
from llmc.formats.schemes import GROUPS, NOT_QUANTIZED, SCHEMES, Budget, Quantization, Scheme

_GROUPS = tuple(f"g{size}" for size in reversed(GROUPS))
# Options that say what shares a scale.
SHARING = frozenset({*_GROUPS, "channel", "tensor", "block"})
# How tokens are rounded: with a scale for each group of channels, with one, or not at all.
_TOKEN_GROUP, _WHOLE_TOKENS, _PLAIN_TOKENS = f"x{TOKEN_GROUP}", "xrow", "xnone"
# Options that say how tokens are rounded.
ROUNDING = frozenset({_TOKEN_GROUP, _WHOLE_TOKENS, "static", "dynamic"})


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
            fix=f"{did_you_mean(name.lower(), SCHEMES)}known: {', '.join(SCHEMES)}, auto:BITS and none",
        )
    scheme = replace(scheme, name=text)
    by_kind: dict[str, str] = {}
    for word in words:
        scheme = _with_option(scheme, name, word)
        kind = _kind(word)
        if kind in by_kind:
            raise OptionError(
                f"{by_kind[kind]} and {word} are two options for the same thing",
                at=f"quantize={text}",
                fix=f"leave out {by_kind[kind]}, or {word}",
            )
        by_kind[kind] = word
    if scheme.is_static and scheme.token_group is not None:
        raise OptionError(
            "a static scale is shared by all channels of all tokens",
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
        fix=f"options of {name}: {', '.join(options)}" if (options := _options(scheme)) else f"{name} takes no options",
    )


def _kind(word: str) -> str:
    """The property that an option of a scheme sets; two options that set the same thing contradict each other."""
    key = word.partition("=")[0]
    if key in SHARING:
        return "what shares a scale"
    if names_run(key):
        return "columns that share a float"
    pairs = (("sym", "asym"), ("static", "dynamic"), (_TOKEN_GROUP, _WHOLE_TOKENS, _PLAIN_TOKENS))
    return next((pair[0] for pair in (*pairs, ("actorder", "noactorder")) if key in pair), key)


def _options(scheme: Scheme) -> tuple[str, ...]:
    options = tuple(word for g in scheme.codes.granularities for word in (_GROUPS if g == "group" else (g,)))
    options += (f"s256 (or another multiple of {RUN_UNIT})",) if scheme.codes.steps is not None else ()
    options += ("sym", "asym") if scheme.codes.integers is not None and not scheme.codes.is_blocked else ()
    options += ("static", "dynamic") if scheme.activation != "none" else ()
    options += _token_options(scheme)
    options += ("actorder", "noactorder", "damp=0.01") if scheme.method == "gptq" else ()
    options += ("alpha=0.5",) if scheme.method == "smoothquant" else ()
    return options


def names_run(key: str) -> bool:
    """Whether an option names the columns that share a float: whole units of them."""
    digits = key[1:]
    return key[:1] == "s" and digits.isascii() and digits.isdigit() and int(digits) % RUN_UNIT == 0 < int(digits)


def _token_options(scheme: Scheme) -> tuple[str, ...]:
    if scheme.codes.is_blocked:
        return (_TOKEN_GROUP, _WHOLE_TOKENS, _PLAIN_TOKENS)
    return (_TOKEN_GROUP, _WHOLE_TOKENS) if scheme.activation == "int8" else ()


def _share(text: str, word: str) -> float:
    value = number_of(text)
    if not 0.0 <= value <= 1.0:
        raise OptionError(f"{text!r} is not a number from 0.0 to 1.0", at=f"quantize=…:{word}", fix="such as 0.5")
    return value


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
