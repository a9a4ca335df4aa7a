"""How to choose a request's tokens and when to stop: frozen, validated, and closed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from llmc.errors import RequestError
from llmc.runtime.grammar import Grammar


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Each value is checked; one out of range, or a name that does not exist, is a RequestError.

    max_tokens: how many to generate at most; 0 computes prompt_logprobs only. min_tokens: before this many, no
    end-of-text and no stop token.
    temperature: divides the logits; 0 is greedy (the likeliest token after penalties and bias), and the filters below
    then do nothing.
    top_k: keep the k likeliest tokens and ties; None keeps all.
    top_p: keep the smallest set of likeliest tokens whose probabilities sum to at least top_p.
    min_p: keep tokens with at least min_p times the likeliest's probability.
    repetition_penalty: logits of tokens in the prompt or output are divided by it if positive, multiplied if negative.
    presence_penalty, frequency_penalty: taken from the logits of tokens in the output, once, and per occurrence.
    logit_bias: added to the logits, by token id. seed: None draws one from the operating system.
    stop: the text ends before any of these. stop_token_ids: the output ends with any of these.
    ignore_eos: go on after the model's end-of-text token. include_stop_str_in_output: the text keeps the stop string
    that ended it. skip_special_tokens: the text leaves out tokens such as end-of-text.
    n: how many choices. best_of: how many are sampled, the n with the highest mean log-probability are given (None: n).
    With a seed, choice i draws from the seed's i-th stream, so each is reproducible and they differ.
    logprobs: give each token's log-probability and this many of the likeliest (0: the token's only). prompt_logprobs:
    the same for the prompt's tokens.
    beam_width: beam search with this many beams instead of sampling; n (at most beam_width) are given, best first, by
    sum of log-probabilities, after penalties and bias, over length**length_penalty. early_stopping: stop as soon as
    beam_width beams are complete.
    grammar: the output has to be a sentence of it.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False
    grammar: Grammar | None = None

    def __new__(cls, **values: Any) -> SamplingParams:
        """Refuse unknown names before the generated __init__ would raise a bare TypeError."""
        known = sorted(f.name for f in fields(cls))
        for name, value in values.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                fix = f"did you mean {near[0]!r}?" if near else f"known parameters: {', '.join(known)}"
                raise RequestError(f"unknown sampling parameter {name!r}", at=f"{name}={value!r}", fix=fix)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_int("max_tokens", 0)
        self._check_int("min_tokens", 0, self.max_tokens, "max_tokens")
        self._check_float("temperature", 0.0, 1e6)
        if self.top_k is not None:
            self._check_int("top_k", 1)
        self._check_float("top_p", 0.0, 1.0, open_low=True)
        self._check_float("min_p", 0.0, 1.0)
        self._check_float("repetition_penalty", 0.0, 1e6, open_low=True)
        self._check_float("presence_penalty", -1e6, 1e6)
        self._check_float("frequency_penalty", -1e6, 1e6)
        if self.seed is not None:
            self._check_int("seed", 0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "early_stopping"):
            self._check_bool(name)
        self._check_choices()
        self._check_stop()
        self._check_bias()

    def sampled_choices(self) -> int:
        """How many sequences are generated at a time: best_of or n, or the beams."""
        return self.beam_width or self.best_of or self.n

    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    def changes_logits(self) -> bool:
        """Whether penalties, bias or a minimum length change the logits before the choice."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
        )

    def _check_choices(self) -> None:
        self._check_int("n", 1)
        if self.best_of is not None:
            self._check_int("best_of", self.n)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_int(name, 0)
        self._check_float("length_penalty", -1e3, 1e3)
        grammar: object = self.grammar
        if grammar is not None and not isinstance(grammar, Grammar):
            self._refuse("grammar", "a Grammar")
        if self.beam_width is not None:
            self._check_int("beam_width", self.n)
            if self.grammar is not None:
                self._refuse("grammar", "None together with beam_width: beams are not held to a grammar")
            for name in ("best_of", "seed"):
                if getattr(self, name) is not None:
                    self._refuse(name, "None together with beam_width: beam search does not sample")
            if self.temperature != 0:
                self._refuse("temperature", "0 together with beam_width: beam search does not sample")
            if self.max_tokens == 0 or self.prompt_logprobs is not None:
                self._refuse("prompt_logprobs" if self.max_tokens else "max_tokens", "another value with beam_width")

    def _check_bool(self, name: str) -> None:
        if type(getattr(self, name)) is not bool:
            self._refuse(name, "True or False")

    def _check_int(self, name: str, low: int, high: int | None = None, high_name: str = "") -> None:
        value = getattr(self, name)
        if type(value) is not int or value < low or (high is not None and value > high):
            upper = f" to {high_name} ({high})" if high is not None else " up"
            self._refuse(name, f"a whole number from {low}{upper}")

    def _check_float(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < low or value > high or (open_low and value == low):
            self._refuse(name, f"a number {'above' if open_low else 'from'} {low:g} to {high:g}")

    def _check_stop(self) -> None:
        strings = self.stop_strings()
        if not isinstance(strings, tuple | list) or not all(isinstance(s, str) and s for s in strings):
            self._refuse("stop", "a string or several, none of them empty")
        ids = self.stop_token_ids
        if not isinstance(ids, tuple | list) or not all(type(i) is int and i >= 0 for i in ids):
            self._refuse("stop_token_ids", "token ids from 0 up")
        object.__setattr__(self, "stop", tuple(strings))
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    def _check_bias(self) -> None:
        bias = self.logit_bias
        entries = bias.items() if isinstance(bias, Mapping) else ((None, None),)
        if not all(type(i) is int and i >= 0 and isinstance(v, int | float) and math.isfinite(v) for i, v in entries):
            self._refuse("logit_bias", "finite numbers by token id from 0 up")

    def _refuse(self, name: str, allowed: str) -> None:
        value = getattr(self, name)
        seen = f"{value!r:.80}"
        raise RequestError(f"sampling parameter {name} cannot be {seen}", at=f"{name}={seen}", fix=f"give {allowed}")
