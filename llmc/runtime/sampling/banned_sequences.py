"""Sequences of tokens that may not be generated: the last token is banned where the output ends with the others."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from llmc.errors import RequestError
from llmc.runtime.sampling.written_tokens import Written
from llmc.runtime.text.tokenizer import Tokenizer


class BannedSequences:
    """sequences: of token ids, none of them empty. The prompt does not count as a sequence's beginning."""

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
    """Each word as the tokenizer writes it at the beginning of a text and after a space, as vLLM has it.

    Raises RequestError without a tokenizer.
    """
    if not tokenizer.exists:
        raise RequestError(
            "bad_words are texts, and the engine has no tokenizer", at="bad_words", fix="use logit_bias with token ids"
        )
    texts = [space + word.lstrip() for word in words for space in ("", " ")]
    found = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts}
    # A tokenizer may know more tokens than the model.
    return {ids for ids in found if ids and max(ids) < vocab_size}
