"""Edits of a row of logits that depend on the tokens before it, created once per request and shared by its choices.

The order: DRY, the user's processors, banned words, allowed tokens. Bans come last, so that no other edit undoes them.
An edit has no state: it depends on the tokens only, so it is the same after preemption, in every fork, and in every
beam.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.sampling.dry_penalty import DryPenalty, breaker_tokens
from llmc.runtime.sampling.logits_processor import CheckedProcessor, Row
from llmc.runtime.sampling.sampling_params import SamplingParams
from llmc.runtime.sampling.written_tokens import TokenIds, Written
from llmc.runtime.text.tokenizer import Tokenizer

# Takes the row, which it may change, and what was written before it; returns the row.
LogitEdit = Callable[[Row, Written], Row]


def logit_edits(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> tuple[LogitEdit, ...]:
    """The edits of a request's parameters, in order. Raises RequestError for texts without a tokenizer."""
    edits: list[LogitEdit] = []
    if params.dry_multiplier:
        edits.append(
            DryPenalty(
                params.dry_multiplier,
                params.dry_base,
                params.dry_allowed_length,
                breaker_tokens(params.dry_sequence_breakers, tokenizer),
                params.dry_penalty_last_n,
            )
        )
    edits += [CheckedProcessor.of(function, index) for index, function in enumerate(params.logits_processors)]
    if params.bad_words:
        edits.append(BannedSequences(bad_word_sequences(params.bad_words, tokenizer, vocab_size)))
    if params.allowed_token_ids is not None:
        edits.append(AllowedTokens(np.unique(np.asarray(params.allowed_token_ids, np.int64))))
    return tuple(edits)


def edited(scores: Row, edits: Sequence[LogitEdit], written: Written) -> Row:
    """The row after all edits; `scores` may have been changed."""
    for edit in edits:
        scores = edit(scores, written)
    return scores


@dataclass(frozen=True)
class AllowedTokens:
    """No other token may come. ids: ascending."""

    ids: TokenIds

    def __call__(self, scores: Row, written: Written) -> Row:
        """Set all other tokens to -inf."""
        kept = scores[self.ids]
        scores.fill(-np.inf)
        scores[self.ids] = kept
        return scores


class BannedSequences:
    """Bans the last token of a sequence where the output ends with the others.

    sequences: sequences of token ids, none of them empty. The prompt does not count as a sequence's beginning.
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        # By the token before the last, so that a long list costs no more than a short one.
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        always: set[int] = set()
        for *beginning, last in sequences:
            if beginning:
                self._after.setdefault(beginning[-1], []).append((tuple(beginning), last))
            else:
                always.add(last)
        self._always = np.array(sorted(always), np.int64)

    def __call__(self, scores: npt.NDArray[np.float32], written: Written) -> npt.NDArray[np.float32]:
        """scores: [vocabulary], changed in place."""
        scores[self._always] = -np.inf
        output = written.output
        if len(output):
            for beginning, last in self._after.get(int(output[-1]), ()):
                if tuple(output[-len(beginning) :].tolist()) == beginning:
                    scores[last] = -np.inf
        return scores


def bad_word_sequences(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> set[tuple[int, ...]]:
    """Return each word's tokens at the beginning of a text and after a space, as in vLLM.

    Raises RequestError without a tokenizer.
    """
    if not tokenizer.exists:
        raise RequestError(
            "bad_words are texts, and the engine has no tokenizer", at="bad_words", fix="use logit_bias with token ids"
        )
    texts = [space + word.lstrip() for word in words for space in ("", " ")]
    sequences = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts}
    # A tokenizer may know more tokens than the model.
    return {ids for ids in sequences if ids and max(ids) < vocab_size}
