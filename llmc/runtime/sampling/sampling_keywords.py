"""The fields of SamplingParams as keywords of generating functions: `generate(prompt, max_tokens=5)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypedDict

from llmc.errors import RequestError
from llmc.runtime.grammar.grammar import Grammar
from llmc.runtime.sampling.logits_processor import LogitsProcessor
from llmc.runtime.sampling.sampling_params import SamplingParams


class SamplingKeywords(TypedDict, total=False):
    """For type checkers and editors; SamplingParams documents each."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_sequence_breakers: Sequence[str]
    dry_penalty_last_n: int | None
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int] | None
    logits_processors: Sequence[LogitsProcessor]
    seed: int | None
    stop: tuple[str, ...] | str
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    n: int
    best_of: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    beam_width: int | None
    length_penalty: float
    early_stopping: bool
    grammar: Grammar | None
    kv_compression: str | None


def sampling_defaults() -> dict[str, Any]:
    """Return each parameter's default, by name."""
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(SamplingParams)}


def chosen_params(params: SamplingParams | None, keywords: SamplingKeywords) -> SamplingParams:
    """The sampling parameters of a call: params, or those made from keywords; the defaults without either.

    Raises RequestError if both are given, if params has another type, and for values that SamplingParams refuses.
    """
    if params is None:
        for name, value in keywords.items():
            if isinstance(value, SamplingParams):
                raise RequestError(f"{name} is not a sampling parameter", at=name, fix=f"write params={name}")
        return SamplingParams(**keywords)
    if not isinstance(params, SamplingParams):
        raise _no_params(params)
    if keywords:
        raise _given_twice(keywords)
    return params


def params_of_each(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None, keywords: SamplingKeywords
) -> list[SamplingParams]:
    """The sampling parameters of each of `count` prompts: one for all, or one each. Raises as `chosen_params`."""
    if params is None or isinstance(params, SamplingParams):
        return [chosen_params(params, keywords)] * count
    if not isinstance(params, Sequence):
        raise _no_params(params)
    if keywords:
        raise _given_twice(keywords)
    if len(params) != count:
        raise RequestError(
            f"{count} prompts came with {len(params)} sampling parameters",
            fix="give one SamplingParams for all prompts, or one for each",
        )
    for param in params:
        if not isinstance(param, SamplingParams):
            raise _no_params(param)
    return list(params)


def _given_twice(keywords: SamplingKeywords) -> RequestError:
    name, value = next(iter(keywords.items()))
    return RequestError(
        f"{name}={value!r:.80} was given with a SamplingParams, which has its own {name}",
        at=name,
        fix=f"give one of them; dataclasses.replace(params, {name}={value!r:.80}) makes another SamplingParams",
    )


def _no_params(value: object) -> RequestError:
    return RequestError(
        f"{value!r:.80} ({type(value).__name__}) is not a SamplingParams",
        fix="give llmc.SamplingParams(name=value, ...), or the values as keywords: max_tokens=5",
    )
