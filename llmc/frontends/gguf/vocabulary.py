"""The tokens of a GGUF file, their kinds, and the tokens that begin, end and separate texts."""

from collections.abc import Iterable
from dataclasses import dataclass

from llmc.errors import CheckpointError
from llmc.frontends.gguf.metadata import Metadata

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_PREFIX = "tokenizer.ggml."
# Ends of a turn that files may lack an id for, as llama.cpp knows them.
_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|return|>",
        "<|call|>",
        "<EOT>",
    )
)


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a GGUF file. ids: ids of tokens that text may become. control: special tokens, which are not
    text. defined: added tokens that are text."""

    ids: dict[str, int]
    control: tuple[str, ...]
    defined: tuple[str, ...]
    said: Metadata

    @property
    def added(self) -> frozenset[str]:
        """Tokens that are matched in text before all others."""
        return frozenset((*self.control, *self.defined))

    def special(self, name: str) -> str | None:
        """The token that metadata call `bos`, `eos`, `unknown` and so on; None if there is none."""
        key = f"{name}_token_id"
        number = self.said.whole(key) if self.said.has(key) else None
        tokens = self.said.texts("tokens")
        return tokens[number] if number is not None and number < len(tokens) else None

    def ends(self) -> tuple[int, ...]:
        """Ids that end an answer, the file's own end of a text first."""
        named = (self.special(name) for name in ("eos", "eot", "eom"))
        known = (token for token in self.control if token in _ENDS)
        return tuple(dict.fromkeys(self.ids[token] for token in (*named, *known) if token in self.ids))


def read_vocabulary(metadata: Metadata, size: int) -> Vocabulary:
    """Read the vocabulary of a GGUF file.

    size: rows of the embedding. Raises CheckpointError for a vocabulary that does not fit.
    """
    section = metadata.of(_PREFIX)
    tokens = section.texts("tokens")
    kinds = section.numbers("token_type") if section.has("token_type") else (_NORMAL,) * len(tokens)
    if len(tokens) > size or len(kinds) != len(tokens):
        raise CheckpointError(
            f"the vocabulary has {len(tokens)} tokens and {len(kinds)} token types, the embedding table {size} rows",
            at=metadata.at,
            fix="convert the model again",
        )
    ids: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if token and kind != _UNUSED:
            ids.setdefault(token, number)  # Some files hold a token twice: the first one counts.
    return Vocabulary(ids, _of(tokens, kinds, _CONTROL), _of(tokens, kinds, _USER_DEFINED), section)


def _of(tokens: Iterable[str], kinds: Iterable[float], wanted: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted and token))
