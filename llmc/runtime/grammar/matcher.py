"""Grammars as llguidance runs them: translated, matched token by token, as masks over the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError, ToolchainError
from llmc.files.regular_file import read_regular
from llmc.runtime.grammar.grammar import Grammar, GrammarKind, Preamble

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# Weak models fill a whole output with spaces where a grammar allows any; a schema's x-guidance can allow them again.
_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_flexible": False}
# Bounded for the same reason.
_BLANK = r"/\s{1,4}/"
_MOST_TOKENIZER_BYTES = 1 << 30
_JSON_OBJECT = '{"type": "object"}'


class GrammarMask:
    """One output's place in its grammar: which tokens may come next, and whether it is complete."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = np.zeros(-(-vocab_size // 32), np.int32)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """By token id: [vocabulary]. Raises RequestError when the grammar has grown beyond its limits."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        return np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """The token was chosen."""
        self._matcher.consume_token(token)
        self._check()

    def allowed_after(self, tokens: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """What may come after these, if they may come: nothing is accepted."""
        accepted = self._matcher.try_consume_tokens(list(tokens))
        mask = self.allowed() if accepted == len(tokens) and not self._matcher.is_stopped() else None
        self._matcher.rollback(accepted)
        return mask

    def count_acceptable(self, tokens: Sequence[int]) -> int:
        """How many of these, from the first on, may come one after the other: nothing is accepted."""
        return int(self._matcher.validate_tokens(list(tokens)))

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def is_accepting(self) -> bool:
        """Whether what was chosen so far is a sentence of the grammar."""
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())


def grammar_tokenizer(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The vocabulary in llguidance's form; takes up to a second. Raises ToolchainError without the library."""
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise ToolchainError(
            "the package llguidance, which constrains outputs to a grammar, is not installed",
            at="grammar",
            fix="pip install 'llmc-compiler[serve]'",
        ) from None
    tokenizer: LLTokenizer = LLTokenizer(
        read_regular(path, _MOST_TOKENIZER_BYTES).decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
    )
    return tokenizer


def matcher_grammar(grammar: Grammar) -> str:
    """The grammar in llguidance's own notation. Raises RequestError for one that cannot be translated."""
    text = _sentence(grammar)
    return text if grammar.preamble is None else _after(grammar.preamble, text)


def new_matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher at the beginning of a grammar that `matcher_grammar` gave. Raises RequestError for a bad grammar."""
    from llguidance import LLMatcher

    matcher: LLMatcher = LLMatcher(tokenizer, text, log_level=0)
    if matcher.is_error():
        raise _refusal(matcher.get_error())
    return matcher


def start_mask(matcher: LLMatcher, vocab_size: int) -> None:
    """Try the first mask. Raises RequestError if it is beyond the limits, or if nothing may come."""
    if not GrammarMask(matcher, vocab_size).allowed().any():
        raise _refusal("it allows no token at the beginning")


def _sentence(grammar: Grammar) -> str:
    from llguidance import LLMatcher, grammar_from

    source = grammar.source
    try:
        if grammar.kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
            schema = _JSON_OBJECT if grammar.kind is GrammarKind.JSON_OBJECT else source
            return str(LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_DEFAULTS))
        if grammar.kind is GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(source))
        if grammar.kind is GrammarKind.CHOICE:
            return str(LLMatcher.grammar_from_lark(_choice(json.loads(source))))
        return str(grammar_from("grammar", source))
    except Exception as error:
        # llguidance's translator from GBNF has an error of its own, which derives from Exception only.
        if isinstance(error, ValueError | RecursionError) or type(error).__name__ == "GbnfToLarkError":
            raise _refusal(str(error)) from None
        raise


def _after(preamble: Preamble, text: str) -> str:
    """The grammar of any text, then that of `text`, which is one in llguidance's notation."""
    whole: dict[str, Any] = json.loads(text) if text.startswith("{") else {"grammars": [{"lark_grammar": text}]}
    answer, *others = whole["grammars"]
    name = answer["name"] = answer.get("name") or "answer"
    closing = preamble.closing
    # llguidance ends a rule with a suffix where the text does, and a text before a special token.
    free = "free: TEXT " + _mark(closing) if isinstance(closing, int) else f"free[suffix={_mark(closing)}]: TEXT"
    before = "free BLANK?" if preamble.opening is None else f"({_mark(preamble.opening)} free BLANK?)?"
    lark = f"start: {before} @{name}\n{free}\nTEXT: /(?s:.*)/\nBLANK: {_BLANK}\n"
    return json.dumps({**whole, "grammars": [{"name": "with_preamble", "lark_grammar": lark}, answer, *others]})


def _mark(mark: str | int) -> str:
    return f"<[{mark}]>" if isinstance(mark, int) else json.dumps(mark, ensure_ascii=False)


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("a choice is a JSON list of texts, none of them empty")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _refusal(reason: str) -> RequestError:
    return RequestError(
        f"the grammar cannot be used: {' '.join(reason.split())[:300]}",
        at="grammar",
        fix="correct or simplify the schema, expression or grammar",
    )
