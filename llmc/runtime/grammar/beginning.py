"""Whether a grammar runs into limits at its beginning: tried before a request is served, in the grammar's process."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from llmc.runtime.grammar.limits import limit_reached, refusal
from llmc.runtime.grammar.matcher import GrammarMask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Stretches of text that have to come, and of each place behind one so many tokens that may come there.
_STRETCHES, _BRANCHES = 16, 8
# What llguidance writes a special token's id behind; no text in UTF-8 has it.
_SPECIAL = b"\xff"


def check_beginning(matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int) -> None:
    """Follow what has to come at the beginning, and look one token further. Raises RequestError for a grammar that is
    beyond its limits there, or that allows nothing."""
    if not GrammarMask(matcher, vocab_size).allowed().any():
        raise refusal("it allows no token at the beginning")
    written = 0
    for _ in range(_STRETCHES):
        _try_branches(matcher, vocab_size, written)
        forced = [] if matcher.is_stopped() else _forced(matcher, tokenizer)
        if not forced:
            return
        written += matcher.try_consume_tokens(forced)
        if matcher.is_error():
            raise limit_reached(matcher.get_error(), written + 1)
        if matcher.is_stopped():
            return


def _try_branches(matcher: LLMatcher, vocab_size: int, written: int) -> None:
    """Take some of the tokens that may come next, spread over the vocabulary, each for itself."""
    allowed = np.flatnonzero(GrammarMask(matcher, vocab_size, written).allowed())
    for token in islice(allowed, 0, None, max(1, -(-len(allowed) // _BRANCHES))):
        branch = GrammarMask(matcher, vocab_size, written)
        branch.accept(int(token))
        if not branch.is_complete:
            branch.allowed()


def _forced(matcher: LLMatcher, tokenizer: LLTokenizer) -> list[int]:
    """Tokens that have to come. A special token stands among forced bytes as a mark, which is no text."""
    text, mark, _ = matcher.compute_ff_bytes().partition(_SPECIAL)
    return matcher.compute_ff_tokens() if mark and not text else tokenizer.tokenize_bytes(text)
