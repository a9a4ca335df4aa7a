"""Prompts made from a seed: random token ids, with beginnings that groups of requests share."""

import random
from dataclasses import dataclass

from llmc.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class PromptShape:
    """The lengths of generated prompts and outputs. input_len: tokens of a prompt without its shared prefix.
    output_len: tokens to generate.

    range_ratio: lengths are drawn evenly from (1 - ratio) to (1 + ratio) times those. prefix_len: tokens that all
    prompts of a group share; prefix_groups: number of groups, to which requests are assigned cyclically.
    """

    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    prefix_groups: int = 1

    def __post_init__(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 1), ("prefix_len", 0), ("prefix_groups", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} cannot be {getattr(self, name)}", at=name, fix=f"give {least} or more")
        if not 0 <= self.range_ratio < 1:
            raise OptionError(f"range_ratio cannot be {self.range_ratio}", at="range_ratio", fix="give 0 to below 1")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its output together."""
        stretch = 1 + self.range_ratio
        return self.prefix_len + int(self.input_len * stretch) + int(self.output_len * stretch)


@dataclass(frozen=True)
class LoadRequest:
    """A prompt as token ids, and how many tokens to generate."""

    prompt: tuple[int, ...]
    output_len: int


def make_requests(shape: PromptShape, count: int, vocab_size: int, seed: int) -> list[LoadRequest]:
    """`count` requests; the same seed gives the same ones."""
    generator = random.Random(seed)
    # The first ids are special tokens in most vocabularies.
    low = min(64, vocab_size // 4)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(generator.randrange(low, vocab_size) for _ in range(length))

    def drawn(length: int) -> int:
        if not shape.range_ratio:
            return length
        return generator.randint(
            max(1, round(length * (1 - shape.range_ratio))), max(1, int(length * (1 + shape.range_ratio)))
        )

    prefixes = [tokens(shape.prefix_len) for _ in range(shape.prefix_groups)]
    return [
        LoadRequest(prefixes[i % len(prefixes)] + tokens(drawn(shape.input_len)), drawn(shape.output_len))
        for i in range(count)
    ]
