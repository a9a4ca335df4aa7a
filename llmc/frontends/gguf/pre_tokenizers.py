"""How byte-level tokenizers cut a text before they merge, by the names that GGUF files have for it.

Patterns are those of the models' own tokenizer.json; llama.cpp's are the same ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_ONE_DIGIT = r"\p{N}"


@dataclass(frozen=True)
class Cut:
    """A pre-tokenizer. patterns: applied in order. whole_first: a piece that is a token is not split into merges.
    is_composed: text is first normalized to Unicode's form C. begins: default for the begin token if the file does not
    say."""

    patterns: tuple[str, ...]
    whole_first: bool = False
    is_composed: bool = False
    begins: bool = False


def _cased(ending: str) -> str:
    """Words whose capitals come first."""
    return f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{ending}|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{ending}"


_LLAMA3 = Cut((rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), whole_first=True, begins=True)
_QWEN2 = Cut((rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}",), is_composed=True)
_DIGITS_GPT2 = Cut((_ONE_DIGIT, _GPT2))
_TEKKEN = Cut((rf"{_cased('')}|\p{{N}}|{_REST_SLASHED}",), whole_first=True, begins=True)
_O200K = Cut((rf"{_cased(_ENDINGS + '?')}|\p{{N}}{{1,3}}|{_REST_SLASHED}",))

CUTS: Mapping[str, Cut] = MappingProxyType(
    {
        "gpt-2": Cut((_GPT2,)),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": Cut(_QWEN2.patterns, begins=True),
        **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "command-r"), _DIGITS_GPT2),
        "tekken": _TEKKEN,
        "gpt-4o": _O200K,
    }
)
