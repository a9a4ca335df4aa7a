"""Whether a grammar runs into limits at its beginning: tried before a request is served, in the grammar's process."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from llmc.runtime.grammar.limits import DeadEndError, limit_reached, refusal
from llmc.runtime.grammar.matcher import GrammarMask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Limits on forced stretches of text, and on allowed tokens at each place after one.
_STRETCHES, _BRANCHES = 16, 8
# Maximum size of a first choice, such as blanks and names of tool calls, after which further places are followed.
_FEW, _PLACES = 64, 16
# The byte that llguidance writes before a special token's id; UTF-8 text never contains it.
_SPECIAL = b"\xff"


def check_beginning(matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int) -> None:
    """Follow what has to come at the beginning, and look one token further; then follow the first choices, if they are
    few. Raises RequestError for a grammar that is beyond its limits there, or that allows nothing."""
    if not GrammarMask(matcher, vocab_size).allowed().any():
        raise refusal("it allows no token at the beginning")
    written = 0
    for _ in range(_STRETCHES):
        _try_branches(matcher, vocab_size, written)
        consumed = _take_forced(matcher, tokenizer, written)
        if not consumed:
            break
        written += consumed
    _try_choices(matcher, tokenizer, vocab_size, written)


def _try_choices(matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int, written: int) -> None:
    """Follow each of the few texts that may come next, and what has to come after it, as far as there are places. One
    that leads nowhere is not the only one."""
    places = [(matcher, written)]
    for place, count in islice(places, _PLACES):
        if place.is_stopped():
            continue
        with suppress(DeadEndError):
            allowed = GrammarMask(place, vocab_size, count).allowed()
            for token in _choices(allowed, tokenizer)[: _PLACES - len(places)]:
                way = place.deep_copy()
                way.consume_token(token)
                _check(way, count + 1)
                places.append((way, count + 1 + _take_forced(way, tokenizer, count + 1)))


def _choices(allowed: npt.NDArray[np.bool_], tokenizer: LLTokenizer) -> list[int]:
    """The most informative of a few tokens, without white space; none if there are many."""
    tokens = np.flatnonzero(allowed)
    if len(tokens) > _FEW:
        return []
    texts = {int(token): tokenizer.decode_bytes([int(token)]) for token in tokens}
    return [
        token
        for token, text in texts.items()
        if text.strip() and not any(other != text and other.startswith(text) for other in texts.values())
    ]


def _try_branches(matcher: LLMatcher, vocab_size: int, written: int) -> None:
    """Take some of the tokens that may come next, spread over the vocabulary, one at a time."""
    allowed = np.flatnonzero(GrammarMask(matcher, vocab_size, written).allowed())
    for token in islice(allowed, 0, None, max(1, -(-len(allowed) // _BRANCHES))):
        branch = GrammarMask(matcher, vocab_size, written)
        branch.accept(int(token))
        if not branch.is_complete:
            branch.allowed()


def _take_forced(matcher: LLMatcher, tokenizer: LLTokenizer, written: int) -> int:
    """Take the tokens that have to come, and count them."""
    forced = [] if matcher.is_stopped() else _forced(matcher, tokenizer)
    consumed: int = matcher.try_consume_tokens(forced) if forced else 0
    _check(matcher, written + consumed + 1)
    return consumed


def _check(matcher: LLMatcher, token: int) -> None:
    """token: the number of the output's token that was checked."""
    if matcher.is_error():
        raise limit_reached(matcher.get_error(), token)


def _forced(matcher: LLMatcher, tokenizer: LLTokenizer) -> list[int]:
    """The forced tokens. A special token appears among forced bytes as a mark, which is not text."""
    text, mark, _ = matcher.compute_ff_bytes().partition(_SPECIAL)
    return matcher.compute_ff_tokens() if mark and not text else tokenizer.tokenize_bytes(text)
