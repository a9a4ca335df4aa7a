"""How to choose a request's tokens and when to stop: frozen, validated, and closed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from llmc.api.keywords import shows_fields
from llmc.errors import OptionError, RequestError, did_you_mean
from llmc.program import parse_compression
from llmc.runtime.grammar.grammar import Grammar
from llmc.runtime.sampling.logits_processor import LogitsProcessor, argument_count
from llmc.runtime.sampling.sampling_table import SAMPLING_NUMBERS, sampling_default

# A logit in fp32 still matters when added to it.
_MOST_BIAS = 1e6

# Texts that DRY's matches do not cross, as in llama.cpp and text-generation-webui.
DRY_BREAKERS = ("\n", ":", '"', "*")


@shows_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams:
    """How to choose a request's tokens, and when to stop.

    Values are checked: one out of range, or an unknown name, is a RequestError. sampling_table.py has the defaults and
    ranges of numbers.

    Attributes:
        max_tokens: Maximum number of generated tokens; 0 computes prompt_logprobs only.
        min_tokens: Number of tokens before which no end-of-text and no stop token is chosen.
        temperature: Divides the logits; 0 is greedy (the most likely token after penalties and bias) and disables the
            filters below.
        top_k: Keep the k most likely tokens and ties; None keeps all.
        top_p: Keep the smallest set of most likely tokens whose probabilities sum to at least top_p.
        min_p: Keep tokens with at least min_p times the probability of the most likely one.
        typical_p: Keep the smallest set of tokens whose probabilities sum to at least typical_p, in the order of the
            distance of their surprise from the expected one (locally typical sampling, Meister et al. 2022).
        repetition_penalty: Logits of tokens in the prompt or output are divided by it if positive, multiplied if
            negative.
        presence_penalty: Subtracted once from the logits of tokens in the output.
        frequency_penalty: Subtracted per occurrence from the logits of tokens in the output.
        dry_multiplier: DRY subtracts this from the logit of a token that would continue a repetition of the last
            dry_allowed_length tokens; 0 disables it.
        dry_base: Factor for each further token of the repetition.
        dry_allowed_length: Length of a repetition without penalty.
        dry_sequence_breakers: Texts that end a repetition.
        dry_penalty_last_n: Number of last tokens in which repetitions are found; None for all.
        logit_bias: Added to the logits, by token id.
        bad_words: Texts that are not generated: if the output ends with all tokens of one but the last, the last is
            banned.
        allowed_token_ids: All other tokens are banned, including end-of-text.
        logits_processors: Functions of (ids of prompt and output, logits), or of (ids of the prompt, ids of the output,
            logits), that return the logits: float32 arrays [vocabulary]. They run for every token, after penalties and
            bias, and all other requests wait for them.
        seed: None draws one from the operating system.
        stop: The text ends before any of these.
        stop_token_ids: The output ends with any of these.
        ignore_eos: Continue after the model's end-of-text token.
        include_stop_str_in_output: Keep the stop string that ended the text.
        skip_special_tokens: Omit tokens such as end-of-text from the text.
        n: Number of choices. With a seed, choice i draws from the seed's i-th stream, so choices are reproducible and
            differ.
        best_of: Number of choices that are sampled; the n with the highest mean log-probability are returned. None is
            n.
        logprobs: Return each token's log-probability and this number of most likely tokens (0: the token's only).
        prompt_logprobs: The same for the prompt's tokens.
        beam_width: Number of beams of a beam search, instead of sampling. The best n (at most beam_width) are returned,
            by sum of log-probabilities, after penalties and bias, over length**length_penalty.
        length_penalty: The exponent of the length in beam search.
        early_stopping: Stop beam search when beam_width beams are complete.
        grammar: The output follows this grammar.
        kv_compression: Policy for the request's KV cache, as NAME:OPTION=VALUE,…, within the one that the engine was
            built for; None is the default of the load.
    """

    max_tokens: int = sampling_default("max_tokens")
    min_tokens: int = sampling_default("min_tokens")
    temperature: float = sampling_default("temperature")
    top_k: int | None = sampling_default("top_k")
    top_p: float = sampling_default("top_p")
    min_p: float = sampling_default("min_p")
    typical_p: float = sampling_default("typical_p")
    repetition_penalty: float = sampling_default("repetition_penalty")
    presence_penalty: float = sampling_default("presence_penalty")
    frequency_penalty: float = sampling_default("frequency_penalty")
    dry_multiplier: float = sampling_default("dry_multiplier")
    dry_base: float = sampling_default("dry_base")
    dry_allowed_length: int = sampling_default("dry_allowed_length")
    dry_sequence_breakers: Sequence[str] = DRY_BREAKERS
    dry_penalty_last_n: int | None = sampling_default("dry_penalty_last_n")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int | None = sampling_default("seed")
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = sampling_default("n")
    best_of: int | None = sampling_default("best_of")
    logprobs: int | None = sampling_default("logprobs")
    prompt_logprobs: int | None = sampling_default("prompt_logprobs")
    beam_width: int | None = sampling_default("beam_width")
    length_penalty: float = sampling_default("length_penalty")
    early_stopping: bool = False
    grammar: Grammar | None = None
    kv_compression: str | None = None

    def __new__(cls, **values: Any) -> SamplingParams:
        """Refuse unknown names before the generated __init__ would raise a bare TypeError."""
        known = sorted(f.name for f in fields(cls))
        for name, value in values.items():
            if name not in known:
                fix = did_you_mean(name, known).rstrip() or f"known parameters: {', '.join(known)}"
                raise RequestError(f"unknown sampling parameter {name!r}", at=f"{name}={value!r:.80}", fix=fix)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, number in SAMPLING_NUMBERS.items():
            allowed = number.refusal(getattr(self, name))
            if allowed is not None:
                self._refuse(name, allowed)
        if self.min_tokens > self.max_tokens:
            self._refuse("min_tokens", f"a whole number from 0 to max_tokens ({self.max_tokens})")
        self._check_texts("dry_sequence_breakers")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "early_stopping"):
            if type(getattr(self, name)) is not bool:
                self._refuse(name, "True or False")
        if self.kv_compression is not None:
            try:
                parse_compression(self.kv_compression)
            except OptionError as error:
                raise RequestError(error.problem, at=error.at, fix=error.fix) from None
        self._check_choices()
        self._check_stop()
        self._check_bias()
        self._check_edits()

    def __repr__(self) -> str:
        """Show only the fields that differ from their defaults."""
        default = SamplingParams()
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name)]
        return f"SamplingParams({', '.join(changed)})"

    def sampled_choices(self) -> int:
        """Number of sequences that are generated at a time: best_of or n, or the number of beams."""
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
        for name in ("best_of", "beam_width"):
            value = getattr(self, name)
            if value is not None and value < self.n:
                self._refuse(name, f"a whole number from {self.n} up")
        grammar: object = self.grammar
        if grammar is not None and not isinstance(grammar, Grammar):
            self._refuse("grammar", "a Grammar")
        if self.beam_width is not None:
            if self.grammar is not None:
                self._refuse("grammar", "None together with beam_width: beam search does not support grammars")
            for name in ("best_of", "seed"):
                if getattr(self, name) is not None:
                    self._refuse(name, "None together with beam_width: beam search does not sample")
            for name, value in (("temperature", 0.0), ("typical_p", 1.0)):
                if getattr(self, name) != value:
                    self._refuse(name, f"{value:g} together with beam_width: beam search does not sample")
            if self.max_tokens == 0 or self.prompt_logprobs is not None:
                self._refuse("prompt_logprobs" if self.max_tokens else "max_tokens", "another value with beam_width")

    def _check_edits(self) -> None:
        self._check_texts("bad_words")
        ids = self.allowed_token_ids
        if ids is not None:
            if not isinstance(ids, tuple | list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
                self._refuse("allowed_token_ids", "at least one token id, from 0 up, or None")
            object.__setattr__(self, "allowed_token_ids", tuple(ids))
        functions: Any = self.logits_processors
        if not isinstance(functions, tuple | list):
            self._refuse("logits_processors", "a list of functions")
        if not all(callable(function) and argument_count(function) is not None for function in functions):
            self._refuse("logits_processors", "functions of (token ids, logits) or (prompt ids, output ids, logits)")
        object.__setattr__(self, "logits_processors", tuple(functions))

    def _check_texts(self, name: str) -> None:
        texts = getattr(self, name)
        if not isinstance(texts, tuple | list) or not all(isinstance(text, str) and text for text in texts):
            self._refuse(name, "a list of texts, none of them empty")
        object.__setattr__(self, name, tuple(texts))

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
        if not all(type(i) is int and i >= 0 and _is_between(v, -_MOST_BIAS, _MOST_BIAS) for i, v in entries):
            self._refuse("logit_bias", f"numbers from {-_MOST_BIAS:g} to {_MOST_BIAS:g} by token id from 0 up")

    def _refuse(self, name: str, allowed: str) -> None:
        value = getattr(self, name)
        try:
            seen = f"{value!r:.80}"
        except Exception:  # An int of thousands of digits cannot be written.
            seen = f"this {type(value).__name__}"
        raise RequestError(f"sampling parameter {name} cannot be {seen}", at=f"{name}={seen}", fix=f"give {allowed}")


def _is_between(value: object, low: float, high: float) -> bool:
    """Whether it is a number, from low to high; no NaN, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
