"""The tokens that graphs are compared on: the user's, a text's, or, without a tokenizer, random ones by seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import OptionError
from llmc.plural import counted

DEFAULT_LENGTH = 32
# The opening of Jane Austen's "Emma" (1815).
PROSE = (
    "Emma Woodhouse, handsome, clever, and rich, with a comfortable home and happy disposition, seemed to unite some "
    "of the best blessings of existence; and had lived nearly twenty-one years in the world with very little to "
    "distress or vex her. She was the youngest of the two daughters of a most affectionate, indulgent father; and had, "
    "in consequence of her sister's marriage, been mistress of his house from a very early period. Her mother had died "
    "too long ago for her to have more than an indistinct remembrance of her caresses; and her place had been supplied "
    "by an excellent woman as governess, who had fallen little short of a mother in affection."
)


@dataclass(frozen=True)
class Sample:
    """The tokens to run on: a text file, token ids "1,2,3", or, with neither, prose or random ids by seed."""

    text: Path | None = None
    tokens: str | None = None
    length: int = DEFAULT_LENGTH
    seed: int = 0


def sample_tokens(
    tokenizer: Path | None,
    vocab_size: int,
    sample: Sample | None = None,
    max_length: int | None = None,
) -> tuple[int, ...]:
    """Token ids to run a model on: those of the sample as they are, or at most its length and max_length of a text.

    tokenizer: a tokenizer.json; without one (None, or no such file) ids are drawn evenly. Raises OptionError.
    """
    sample = sample or Sample()
    text, length = sample.text, sample.length
    limit = length if max_length is None else min(length, max_length)
    if sample.tokens is not None:
        return _checked(_parse(sample.tokens), vocab_size, max_length)
    if tokenizer is not None and tokenizer.is_file():
        return _checked(
            _encode(tokenizer, read_text(text) if text is not None else PROSE)[:limit], vocab_size, max_length
        )
    if text is not None:
        raise OptionError(
            "the model has no tokenizer.json, so there is no way to read a text",
            at=f"--text {text}",
            fix="give token ids: --tokens 1,2,3, or leave out both options for random ids",
        )
    import numpy as np  # Here because the command line imports this file for its options.

    return tuple(np.random.default_rng(sample.seed).integers(0, vocab_size, limit).tolist())


def _encode(tokenizer: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    try:
        encoder: Tokenizer = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # The library raises a bare Exception for a file that it cannot parse.
        raise OptionError(f"the tokenizer cannot be read: {error}", at=tokenizer, fix="give --tokens 1,2,3") from None
    encoder.no_truncation()
    encoder.no_padding()
    ids: list[int] = encoder.encode(text).ids
    return ids


def read_text(text: Path) -> str:
    """Read a text file. Raises OptionError if it is not one in UTF-8."""
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the text file: {error}", at=text, fix="name a UTF-8 text file") from None


def _parse(tokens: str) -> list[int]:
    parts = [part.strip() for part in tokens.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise OptionError(
            f"{tokens!r:.80} is not a list of token ids",
            at="--tokens",
            fix="write whole numbers with commas: --tokens 1,2,3",
        )
    return [int(part) for part in parts]


def _checked(ids: Sequence[int], vocab_size: int, max_length: int | None) -> tuple[int, ...]:
    if len(ids) < 2:
        raise OptionError(f"{len(ids)} token(s) to compare on", at="tokens", fix="give at least two")
    if max_length is not None and len(ids) > max_length:
        raise OptionError(
            f"{counted(len(ids), 'token')}, the model takes {max_length}",
            at="--tokens",
            fix=f"give at most {max_length}",
        )
    wrong = [i for i in ids if i >= vocab_size]
    if wrong:
        raise OptionError(
            f"token id {wrong[0]} is not below the vocabulary's {vocab_size}",
            at="tokens",
            fix=f"give ids from 0 to {vocab_size - 1}, of this model's own tokenizer",
        )
    return tuple(ids)
