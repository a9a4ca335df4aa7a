"""Grammars as llguidance runs them: translated, matched token by token, as masks over the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError, ToolchainError
from llmc.files.regular_file import read_regular
from llmc.runtime.grammar.grammar import TOKENS_AS_THEY_COME, Grammar, GrammarKind, Mark, Marks, Preamble
from llmc.runtime.grammar.limits import limit_reached, parser_limits, refusal
from llmc.runtime.grammar.mask_time import MaskTime
from llmc.runtime.grammar.plain_tokens import with_plain_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# Weak models fill a whole output with spaces where a grammar allows any; a schema's x-guidance can allow them again.
# Keywords that llguidance does not know are ignored with a warning.
_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_flexible": False, "lenient": True}
# Bounded for the same reason.
_BLANK = r"/\s{1,4}/"
_MOST_TOKENIZER_BYTES = 1 << 30
_JSON_OBJECT = '{"type": "object"}'


class GrammarMask:
    """One output's place in its grammar: which tokens may come next, and whether it is complete.

    beginning: after `written` tokens; copied. A limit of the grammar that only a guess runs into does not harm the
    output: what was accepted is matched again, and no further guess is checked. time: that its masks may take.
    """

    def __init__(
        self, beginning: LLMatcher, vocab_size: int, written: int = 0, *, time: MaskTime | None = None
    ) -> None:
        self._beginning, self._written = beginning, written
        self._time = MaskTime() if time is None else time
        self._matcher = beginning.deep_copy()
        self._vocab_size = vocab_size
        self._words = np.zeros(-(-vocab_size // 32), np.int32)
        self._accepted: list[int] = []
        self._looks_ahead = True

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each token id whether it may come next: [vocabulary]. Raises RequestError when the grammar has
        grown beyond its limits."""
        mask = self._mask()
        self._check(len(self._accepted) + 1)
        return mask

    def accept(self, token: int) -> None:
        """Advance the grammar by the chosen token. Raises as `allowed`."""
        self._accepted.append(token)
        self._time.start()
        self._matcher.consume_token(token)
        self._time.stop()
        self._time.next_token()
        self._check(len(self._accepted))

    def allowed_after(self, tokens: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """The tokens allowed after these, if these are allowed; the state does not change."""
        if not self._looks_ahead:
            return None
        accepted = self._matcher.try_consume_tokens(list(tokens))
        mask = self._mask() if accepted == len(tokens) and not self._matcher.is_stopped() else None
        if self._matcher.is_error():
            self._match_again()
            return None
        self._matcher.rollback(accepted)
        return mask

    def count_acceptable(self, tokens: Sequence[int]) -> int:
        """The number of these tokens, from the first on, that are allowed consecutively; the state does not change."""
        if not self._looks_ahead:
            return 0
        count = int(self._matcher.validate_tokens(list(tokens)))
        if self._matcher.is_error():
            self._match_again()
            return 0
        return count

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def is_accepting(self) -> bool:
        """Whether the chosen tokens are a complete sentence of the grammar."""
        return bool(self._matcher.is_accepting())

    def _mask(self) -> npt.NDArray[np.bool_]:
        self._time.start()
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._time.stop()
        return np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)

    def _match_again(self) -> None:
        """A matcher never leaves an error: take another to where the output is."""
        self._looks_ahead = False
        self._matcher = self._beginning.deep_copy()
        self._matcher.consume_tokens(self._accepted)
        self._check(len(self._accepted))

    def _check(self, token: int) -> None:
        """token: the number of the output's token that a mask or a parser's row is for."""
        if self._matcher.is_error():
            raise limit_reached(self._matcher.get_error(), self._written + token)
        self._time.check(self._written + token)


def grammar_tokenizer(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The vocabulary in llguidance's form; takes up to a second. Raises ToolchainError without the library, and
    RequestError for a tokenizer whose tokens it cannot read as bytes, such as WordPiece."""
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise ToolchainError(
            "the package llguidance, which constrains outputs to a grammar, is not installed",
            at="grammar",
            fix="pip install 'llmc-compiler[serve]'",
        ) from None
    config = with_plain_tokens(read_regular(path, _MOST_TOKENIZER_BYTES).decode(), eos_token_ids)
    try:
        tokenizer: LLTokenizer = LLTokenizer(config, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except Exception as error:
        raise RequestError(
            f"this model's tokenizer does not support grammars: {' '.join(str(error).split()):.200}",
            at="grammar",
            fix="leave the grammar out",
        ) from error
    return tokenizer


def matcher_grammar(grammar: Grammar) -> str:
    """The grammar in llguidance's own notation. Raises RequestError for one that cannot be translated."""
    text = _sentence(grammar)
    return text if grammar.preamble is None and grammar.instead is None else _around(grammar, text)


def new_matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher at the beginning of a grammar that `matcher_grammar` gave. Raises RequestError for a bad grammar."""
    from llguidance import LLMatcher

    matcher: LLMatcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise refusal(matcher.get_error())
    return matcher


def schema_fault(tokenizer: LLTokenizer, schema: Mapping[str, Any]) -> str | None:
    """llguidance's reason why a JSON schema cannot become a grammar; None if it can."""
    from llguidance import LLMatcher

    text = str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_DEFAULTS))
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    return str(matcher.get_error()) if matcher.is_error() else None


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
        # llguidance's translator from GBNF has its own error, which derives from Exception only.
        if isinstance(error, ValueError | RecursionError) or type(error).__name__ == "GbnfToLarkError":
            raise refusal(str(error)) from None
        raise


def _around(grammar: Grammar, text: str) -> str:
    """The preamble, then `text`, which is a grammar in llguidance's notation, or what may come instead."""
    whole: dict[str, Any] = json.loads(text) if text.startswith("{") else {"grammars": [{"lark_grammar": text}]}
    answer, *others = whole["grammars"]
    name = answer["name"] = answer.get("name") or "answer"
    preamble, sentence = grammar.preamble, f"@{name}"
    if preamble is not None and preamble.heading:
        sentence = f"{_marks(preamble.heading)} {sentence}"
    if grammar.instead is not None:
        sentence = f"({sentence} | @instead)"
        others.append({"name": "instead", "lark_grammar": grammar.instead})
    start = f"start: {sentence}\n" if preamble is None else _after(preamble, sentence)
    lark = f"{TOKENS_AS_THEY_COME}\n{start}"
    return json.dumps({**whole, "grammars": [{"name": "around", "lark_grammar": lark}, answer, *others]})


def _after(preamble: Preamble, sentence: str) -> str:
    """The grammar of any text up to the preamble's closing marks, then that of the sentence."""
    first, *rest = preamble.closing
    # llguidance ends a rule with a suffix where the text does, and a text before a special token.
    ends = f"free: TEXT {_mark(first)}" if isinstance(first, int) else f"free[suffix={_mark(first)}]: TEXT"
    closed = " ".join(["free", *map(_mark, rest), "BLANK?"])
    if preamble.opening is not None:
        closed = f"({_marks(preamble.opening)} {closed}){'*' if preamble.repeats else '?'}"
    return f"start: {closed} {sentence}\n{ends}\nTEXT: /(?s:.*)/\nBLANK: {_BLANK}\n"


def _marks(marks: Marks) -> str:
    return " ".join(map(_mark, marks))


def _mark(mark: Mark) -> str:
    return f"<[{mark}]>" if isinstance(mark, int) else json.dumps(mark, ensure_ascii=False)


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("a choice is a JSON list of texts, none of them empty")
    # A terminal, since each alternative of a rule counts against the parser's limits.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
