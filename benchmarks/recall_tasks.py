"""The tasks of benchmarks/recall.py: haystacks that hold, at some depth, what the end of the prompt asks for.

`copies`, for the copying models: different random tokens. The prompt ends with the beginning of one piece, and the
answer is the rest. `repeats` is the same, except that the piece has occurred twice before the end asks for it, as in a
conversation that comes back to something. `needles`, for a model of text: prose with a sentence that tells a number,
and the same sentence without the number at the end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import and_
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.copying_model import BEGINNING, VOCABULARY
from benchmarks.special_prefix import special_prefix
from llmc.errors import OptionError

# Tokens of a piece that the prompt repeats, and those that follow.
_REPEATED, _RECALLED = 8, 4
SPECIAL = 3
_HAYSTACK = 8192
_PLACES = ("Cairo", "Lima", "Oslo", "Paris", "Tokyo")


@dataclass(frozen=True)
class Task:
    """Prompts by depth, from the haystack's beginning to its end, and the tokens that follow each.

    Args:
        name: as the option --task names it.
        prompts: [depths][prompts][tokens].
        answers: [depths][prompts][tokens].
        asked: number of tokens at the end of each prompt that ask.
        uncounted: number of first tokens of each answer that recall leaves out.
        is_chain: whether each token of an answer asks for the next one. Tokens after a wrong one then do not count.
    """

    name: str
    prompts: tuple[tuple[tuple[int, ...], ...], ...]
    answers: tuple[tuple[tuple[int, ...], ...], ...]
    asked: int
    uncounted: int = 0
    is_chain: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        pairs = zip(self.prompts, self.answers, strict=True)
        return max(len(p) + len(a) for ps, answers in pairs for p, a in zip(ps, answers, strict=True))

    def share(self, said: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> float:
        """The share of tokens that are as wanted, among those that count. said, wanted: [prompts][tokens]."""
        right = list[bool]()
        for row, expected in zip(said, wanted, strict=True):
            of_row = [one == other for one, other in zip(row, expected, strict=False)]
            right += (list(accumulate(of_row, and_)) if self.is_chain else of_row)[self.uncounted :]
        return sum(right) / len(right)


def copies(length: int, depths: int, prompts: int, vocabulary: int = VOCABULARY) -> Task:
    """Prompts of `length` tokens, all different except for a piece whose beginning comes again at the end."""
    return _pieces("copies", length, depths, prompts, vocabulary, is_repeated=False)


def repeats(length: int, depths: int, prompts: int, vocabulary: int = VOCABULARY) -> Task:
    """Prompts of `length` tokens in which a piece occurs twice before its beginning comes at the end.

    The depth is that of the second occurrence. The first one is at a random place before it.
    """
    return _pieces("repeats", length, depths, prompts, vocabulary, is_repeated=True)


def _pieces(name: str, length: int, depths: int, prompts: int, vocabulary: int, is_repeated: bool) -> Task:
    """Prompts in which a piece occurs once or twice, and whose end asks for it with its beginning.

    Logits of the prompt's last token give the answer's first token, before most policies have dropped any row. It is
    not counted.
    """
    chance = torch.Generator().manual_seed(0)
    asked: list[tuple[tuple[int, ...], ...]] = []
    wanted: list[tuple[tuple[int, ...], ...]] = []
    piece = _REPEATED + _RECALLED
    hay_length = length - 1 - _REPEATED - (piece if is_repeated else 0)
    last = hay_length - piece
    if not piece <= hay_length <= vocabulary - SPECIAL:
        raise OptionError(
            f"prompts of {length} tokens have {hay_length} different ones, and the model knows {vocabulary - SPECIAL}",
            at="--length",
            fix=f"choose a length below {vocabulary - SPECIAL}",
        )
    for depth in range(depths):
        first = round(depth * last / max(depths - 1, 1))
        rows, answers = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for _ in range(prompts):
            hay = (SPECIAL + torch.randperm(vocabulary - SPECIAL, generator=chance)[:hay_length]).tolist()
            said, tokens = hay[first : first + piece], list(hay)
            if is_repeated:
                place = int(torch.randint(first + 1, (), generator=chance))
                tokens[place:place] = said
            rows.append((BEGINNING, *tokens, *said[:_REPEATED]))
            answers.append(tuple(said[_REPEATED:]))
        asked.append(tuple(rows))
        wanted.append(tuple(answers))
    return Task(name, tuple(asked), tuple(wanted), _REPEATED, uncounted=1, is_chain=True)


def haystack(file: Path, vocabulary: int = VOCABULARY) -> Path:
    """Write tokens of the kind that `copies` has, to calibrate with; returns the file."""
    drawn = torch.randint(SPECIAL, vocabulary, (_HAYSTACK,), generator=torch.Generator().manual_seed(1))
    file.write_text(json.dumps(drawn.tolist()))
    return file


def needles(length: int, depths: int, prompts: int, tokenizer: Path, text: Path) -> Task:
    """Prompts of `length` tokens: the text, with one sentence more, and the question.

    The tokenizer's special tokens, such as <bos>, come first, and depth 0 is behind them.
    """
    tokens = Tokenizer.from_file(str(tokenizer))

    def ids(of: str) -> tuple[int, ...]:
        return tuple(tokens.encode(of, add_special_tokens=False).ids)

    prefix = special_prefix(tokens)
    prose, chance = ids(text.read_text(encoding="utf-8")), random.Random(0)
    asked: list[tuple[tuple[int, ...], ...]] = []
    wanted: list[tuple[tuple[int, ...], ...]] = []
    ask = ids("\nThe secret code of Cairo is")
    for depth in range(depths):
        rows, answers = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for _ in range(prompts):
            number, place = chance.randrange(10_000, 100_000), chance.choice(_PLACES)
            question = f"\nThe secret code of {place} is"
            told, asks = ids(f"{question} {number}.\n"), ids(question)
            count, begin = length - len(prefix) - len(told) - len(asks), chance.randrange(len(prose) - length)
            hay, at = prose[begin : begin + count], round(depth * count / max(depths - 1, 1))
            rows.append((*prefix, *hay[:at], *told, *hay[at:], *asks))
            answers.append(ids(f" {number}"))
        asked.append(tuple(rows))
        wanted.append(tuple(answers))
    return Task("needles", tuple(asked), tuple(wanted), len(ask))
