"""How a tokenizer tells the texts of a pair apart: by a token between them, behind which the next segment begins."""

from itertools import accumulate
from pathlib import Path

from llmc.errors import CaptureError

_FILE = "tokenizer.json"


def pair_separator(directory: Path | None, count: int) -> int | None:
    """The token whose number before another is that one's segment, of `count`; None if all tokens are of segment 0.

    Raises CaptureError where there is no tokenizer to ask, or segments are something else.
    """
    file = None if directory is None else directory / _FILE
    if file is None or not file.is_file():
        raise CaptureError(
            f"a pair of texts is told apart by {count} segments, which follow from a tokenizer, and there is none",
            at=directory,
            fix=f"build from a model directory with its {_FILE}",
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    pair = tokenizer.encode("a b", "c d")
    ids, segments = list(pair.ids), list(pair.type_ids)
    if not any(segments):
        return None
    separator = ids[-1]
    before = [0, *accumulate(int(token == separator) for token in ids[:-1])]
    if segments != [min(each, count - 1) for each in before]:
        raise CaptureError(
            f"the tokenizer gives a pair the segments {segments}, expected one more behind each {separator}",
            at=file,
            fix="build a reranker without token types, such as one of XLM-RoBERTa or ModernBERT",
        )
    return separator
