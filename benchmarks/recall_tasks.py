"""The tasks of benchmarks/recall.py: haystacks that hold, at some depth, what the end of the prompt asks for.

`copies`, for the copying model: different random tokens. The prompt ends with the beginning of one piece, and the
answer is the rest. `needles`, for a model of text: prose with a sentence that tells a number, and the same sentence
without the number at the end.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.copying_model import BEGINNING, VOCABULARY
from benchmarks.special_prefix import special_prefix

# Tokens of a piece that the prompt repeats, and those that follow.
_REPEATED, _RECALLED = 8, 4
_SPECIAL = 3
_HAYSTACK = 8192
_PLACES = ("Cairo", "Lima", "Oslo", "Paris", "Tokyo")


@dataclass(frozen=True)
class Task:
    """Prompts by depth, from the haystack's beginning to its end, and the tokens that follow each.

    Args:
        prompts: [depths][prompts][tokens].
        answers: [depths][prompts][tokens].
        asked: number of tokens at the end of each prompt that ask.
    """

    prompts: tuple[tuple[tuple[int, ...], ...], ...]
    answers: tuple[tuple[tuple[int, ...], ...], ...]
    asked: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        pairs = zip(self.prompts, self.answers, strict=True)
        return max(len(p) + len(a) for ps, answers in pairs for p, a in zip(ps, answers, strict=True))


def copies(length: int, depths: int, prompts: int) -> Task:
    """Prompts of `length` tokens, all different except for what is repeated."""
    chance = torch.Generator().manual_seed(0)
    asked: list[tuple[tuple[int, ...], ...]] = []
    wanted: list[tuple[tuple[int, ...], ...]] = []
    hay_length = length - 1 - _REPEATED
    last = hay_length - _REPEATED - _RECALLED
    for depth in range(depths):
        first = round(depth * last / max(depths - 1, 1))
        end = first + _REPEATED
        drawn = (torch.randperm(VOCABULARY - _SPECIAL, generator=chance)[:hay_length] for _ in range(prompts))
        hay = [(_SPECIAL + tokens).tolist() for tokens in drawn]
        asked.append(tuple((BEGINNING, *row, *row[first:end]) for row in hay))
        wanted.append(tuple(tuple(row[end : end + _RECALLED]) for row in hay))
    return Task(tuple(asked), tuple(wanted), _REPEATED)


def haystack(file: Path) -> Path:
    """Write tokens of the kind that `copies` has, to calibrate with; returns the file."""
    drawn = torch.randint(_SPECIAL, VOCABULARY, (_HAYSTACK,), generator=torch.Generator().manual_seed(1))
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
    return Task(tuple(asked), tuple(wanted), len(ask))
