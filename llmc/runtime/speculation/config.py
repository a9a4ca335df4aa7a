"""The value of --speculative-config: vLLM's JSON, with its keys and defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmc.errors import OptionError, did_you_mean
from llmc.runtime.speculation.acceptance_config import AcceptanceConfig, AcceptanceMethod, take_acceptance
from llmc.runtime.speculation.config_values import OPTION, number, read_values, text
from llmc.runtime.speculation.draft import MOST_NODES

if TYPE_CHECKING:
    from llmc.runtime.speculation.drafter import Drafter

MOST_DRAFTS = 1024
TREE_WIDTH = 4
EXAMPLE = '\'{"method": "ngram", "num_speculative_tokens": 4}\''


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Settings of every method: the acceptance of drafts, and num_speculative_tokens, the maximum number of drafts per
    step."""

    num_speculative_tokens: int = number(1, MOST_DRAFTS)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(MethodConfig):
    """Settings of drafts by a second engine.

    model: the engine that drafts; required. num_speculative_tokens: maximum drafts per step; required.
    """

    model: str = text()


@dataclass(frozen=True, kw_only=True)
class HiddenConfig(MethodConfig):
    """Settings of drafts by built-in layers, EAGLE-3 or MTP.

    num_speculative_tokens: required. tree_width: tokens of a request that each step of the draft continues; default
    4. It is 1, which makes chains, for acceptance methods that need chains.
    """

    tree_width: int = number(1, MOST_NODES)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HiddenConfig):
    """Settings for an engine that was built with an EAGLE-3 drafter."""


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(MethodConfig):
    """Settings of drafts by Medusa heads. num_speculative_tokens: maximum drafts per step; default 8."""

    num_speculative_tokens: int = number(1, MOST_DRAFTS, 8)


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig(MethodConfig):
    """Settings of lookahead decoding.

    window: columns of tokens for later positions; default 5. ngram: tokens of an n-gram; default 3. guesses: n-grams
    that are verified in a step; default 5. num_speculative_tokens: maximum drafts per step; default (window + guesses)
    · (ngram - 1), which must be at most 63.
    """

    num_speculative_tokens: int = number(1, MOST_DRAFTS, MOST_NODES)
    window: int = number(1, MOST_NODES, 5)
    ngram: int = number(2, 16, 3)
    guesses: int = number(1, MOST_NODES, 5)


@dataclass(frozen=True, kw_only=True)
class MtpConfig(HiddenConfig):
    """Settings for an engine that was built with its model's multi-token prediction layers."""


@dataclass(frozen=True, kw_only=True)
class NgramConfig(MethodConfig):
    """Settings of drafts by n-grams of the request's own tokens.

    num_speculative_tokens: maximum drafts per step; required. prompt_lookup_min, prompt_lookup_max: number of last
    tokens that must match; each defaults to the other, and both to 5.
    """

    prompt_lookup_min: int = number(1, 1024)
    prompt_lookup_max: int = number(1, 1024)


@dataclass(frozen=True, kw_only=True)
class SuffixConfig(MethodConfig):
    """Settings of drafts by suffixes of this and earlier answers.

    num_speculative_tokens: maximum drafts per step; default suffix_decoding_max_tree_depth.
    suffix_decoding_max_tree_depth: maximum length of match and drafts together; default 24.
    suffix_decoding_max_cached_requests: number of earlier answers that are kept; default 10000, 0 keeps none.
    suffix_decoding_max_spec_factor: drafts per matching token; default 1.0. suffix_decoding_min_token_prob: minimum
    probability of a draft, by the frequency of its tokens; default 0.1.
    """

    suffix_decoding_max_tree_depth: int = number(1, 1024, 24)
    suffix_decoding_max_cached_requests: int = number(0, 10**9, 10_000)
    suffix_decoding_max_spec_factor: float = number(0, 1000, 1.0)
    suffix_decoding_min_token_prob: float = number(0, 1, 0.1)


SpeculativeConfig = (
    DraftModelConfig | Eagle3Config | LookaheadConfig | MedusaConfig | MtpConfig | NgramConfig | SuffixConfig
)
_KINDS: Mapping[str, type[SpeculativeConfig]] = {
    "draft_model": DraftModelConfig,
    "eagle3": Eagle3Config,
    "lookahead": LookaheadConfig,
    "medusa": MedusaConfig,
    "mtp": MtpConfig,
    "ngram": NgramConfig,
    "suffix": SuffixConfig,
}
METHODS = tuple(_KINDS)


def parse_speculative_config(given: str | Mapping[str, object]) -> SpeculativeConfig:
    """Parse a JSON object, as text or parsed already; null counts as missing. Raises OptionError."""
    values = {str(key): value for key, value in _object(given).items() if value is not None}
    method = values.pop("method", None)
    acceptance = take_acceptance(values)
    is_invariant = acceptance.method is AcceptanceMethod.INVARIANT
    if method in ("eagle3", "mtp"):
        values = {"tree_width": TREE_WIDTH if is_invariant else 1, **values}
    config = _of_method(method, values)
    makes_trees = isinstance(config, LookaheadConfig | MedusaConfig)
    if isinstance(config, HiddenConfig):
        makes_trees = config.tree_width > 1
    if makes_trees and not is_invariant:
        raise OptionError(
            f"the method {method!r} drafts trees; rejection_sample_method {acceptance.method.value!r} needs chains",
            at=OPTION,
            fix="leave rejection_sample_method out, or draft chains: with a draft model, n-grams or suffixes, or with "
            "eagle3 and mtp of tree_width 1",
        )
    wanted: Any = values.get("num_speculative_tokens", 1)
    if makes_trees and wanted > MOST_NODES:
        chains = ", or draft chains: tree_width 1" if isinstance(config, HiddenConfig) else ""
        raise OptionError(
            f"num_speculative_tokens {wanted} is more than the {MOST_NODES} drafts of a tree, which {method!r} makes",
            at=OPTION,
            fix=f"give at most {MOST_NODES}{chains}",
        )
    return replace(config, acceptance=acceptance)


def _of_method(method: object, values: Mapping[str, Any]) -> SpeculativeConfig:
    kind = _KINDS.get(method) if isinstance(method, str) else None
    if not isinstance(method, str) or kind is None:
        raise _unknown_method(method)
    if method in ("eagle3", "medusa", "mtp") and "model" in values:
        raise OptionError(
            f"the drafter of the method {method!r} is in the engine, but model names another",
            at=OPTION,
            fix=f"build it in, and leave model out: llmc build MODEL --speculative {values['model']!s:.200}",
        )
    if method == "ngram":
        shortest, longest = values.get("prompt_lookup_max", 5), values.get("prompt_lookup_min", 5)
        values = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest, **values}
    if method == "suffix":
        values = {"num_speculative_tokens": values.get("suffix_decoding_max_tree_depth", 24), **values}
    config = read_values(kind, values, method)
    if isinstance(config, NgramConfig) and config.prompt_lookup_min > config.prompt_lookup_max:
        raise OptionError(
            f"prompt_lookup_min {config.prompt_lookup_min} is more than prompt_lookup_max {config.prompt_lookup_max}",
            at=OPTION,
            fix="give prompt_lookup_max at least as much",
        )
    return _of_one_step(config) if isinstance(config, LookaheadConfig) else config


def _of_one_step(config: LookaheadConfig) -> LookaheadConfig:
    """Limit drafts to those that the window and the guesses make."""
    drafts = (config.window + config.guesses) * (config.ngram - 1)
    if drafts > MOST_NODES:
        raise OptionError(
            f"window {config.window} and guesses {config.guesses} of ngram {config.ngram} make {drafts} drafts a step, "
            f"more than {MOST_NODES}",
            at=OPTION,
            fix="give a smaller window, fewer guesses or a smaller ngram",
        )
    return replace(config, num_speculative_tokens=min(drafts, config.num_speculative_tokens))


def new_drafter(config: LookaheadConfig | MedusaConfig | NgramConfig | SuffixConfig) -> Drafter:
    """A new drafter without any state."""
    # Not before: options are parsed before there is a reason to import the runtime.
    from llmc.runtime.speculation.earlier_answers import EarlierAnswers
    from llmc.runtime.speculation.lookahead import LookaheadDrafter
    from llmc.runtime.speculation.medusa import MedusaDrafter
    from llmc.runtime.speculation.ngram import NgramDrafter
    from llmc.runtime.speculation.suffix import SuffixDrafter

    if isinstance(config, LookaheadConfig):
        return LookaheadDrafter(config.window, config.ngram, config.guesses)
    if isinstance(config, MedusaConfig):
        return MedusaDrafter()
    if isinstance(config, NgramConfig):
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    depth = config.suffix_decoding_max_tree_depth
    earlier = EarlierAnswers(depth, config.suffix_decoding_max_cached_requests)
    return SuffixDrafter(depth, config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob, earlier)


def _object(given: object) -> Mapping[Any, object]:
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{given!r:.200} is not JSON: {error}", at=OPTION, fix=f"give {EXAMPLE}") from None
    if not isinstance(value, Mapping):
        raise OptionError(f"{value!r:.200} is not a JSON object", at=OPTION, fix=f"give {EXAMPLE}")
    return value


def _unknown_method(method: object) -> OptionError:
    fix = f"give one of {', '.join(METHODS)}: {EXAMPLE}"
    if method is None:
        return OptionError("no method is given", at=OPTION, fix=fix)
    return OptionError(
        f"unknown method {method!r:.80}", at=OPTION, fix=did_you_mean(str(method), METHODS).rstrip() or fix
    )
