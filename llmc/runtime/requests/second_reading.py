"""A second reading: a request reads the beginning of its prompt again before its table is cut (docs/cutting-tables.md).

The queries of the tokens that are read again say which rows are needed to repeat the prompt. Each part follows the rows
of the beginning. Its own rows leave when it ends, and the next part starts at the same position. So the request's
tokens, digests and logits have nothing of the reading.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmc.errors import RequestError
from llmc.program import CachePolicy, Compression, Cut, Limits
from llmc.runtime.text.tokenizer import Tokenizer

INSTRUCTION = "\n\nRepeat the previous context exactly:\n\n"
# Number of tokens before a part's own that it begins with, so that the model finds the place.
CUE = 8


@dataclass(eq=False, slots=True)
class SecondReading:
    """A reading that is under way. Written by request_blocks.py.

    Args:
        end: Number of tokens of the request that are read again, and the position that each part begins at.
        parts: Tokens of the parts that have not ended. The first one is being read.
        every: Number of tokens whose queries change the scores together.
        scored: Number of tokens, of the request and then of the part, whose queries have done so. None until scores
            have been set to 0.
    """

    end: int
    parts: list[list[int]]
    every: int
    scored: int | None = None

    @property
    def part_end(self) -> int:
        """Number of tokens of the request and of the part."""
        return self.end + len(self.parts[0])

    @property
    def most(self) -> int:
        """Number of tokens of the request and of the longest part that is left."""
        return self.end + max(map(len, self.parts))

    @property
    def next_update(self) -> int:
        """Number of tokens, counted as `scored`, after which scores change next."""
        return self.end if self.scored is None else min(self.scored + self.every, self.part_end)

    def token_ids(self, start: int, count: int) -> list[int]:
        """The part's tokens from a position on."""
        return self.parts[0][start - self.end : start - self.end + count]

    def cut(self, last: Cut, computed: int) -> Cut:
        """The change of the table after `computed` tokens: `last` at the end of the last part. Until then all rows of
        the request stay."""
        queries = 0 if self.scored is None else computed - self.scored
        if len(self.parts) == 1 and computed == self.part_end:
            return replace(last, queries=queries)
        return Cut((), chosen=self.end, queries=queries)


def parts_of(tokens: Sequence[int], end: int, longest: int, instruction: Sequence[int]) -> list[list[int]]:
    """The parts in which the first `end` tokens are read again. longest: as longest_part returns it."""
    return [
        [*instruction, *tokens[max(0, begin - CUE) : begin], *tokens[begin : min(end, begin + longest)]]
        for begin in range(0, end, longest)
    ]


def instruction_of(policy: CachePolicy, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that ask the model to repeat a text; none for a policy without second readings, or without a
    tokenizer."""
    if not (isinstance(policy, Compression) and policy.READS_AGAIN and tokenizer.exists):
        return ()
    return tuple(tokenizer.encode(INSTRUCTION, add_special_tokens=False))


def longest_part(reads: int, end: int, limits: Limits, instruction: Sequence[int]) -> int:
    """Return the largest number of the request's tokens in one part; not positive if there is no room for any.

    Args:
        reads: Number of tokens that the policy reads again at once.
        end: Number of tokens that are read again, which is also the position of each part.
        limits: Limits of the engine's steps and sequences.
        instruction: Tokens that each part begins with, before the cue.
    """
    return min(reads, min(limits.max_batch_tokens, limits.max_model_len - end) - len(instruction) - CUE)


def most_tokens(reads: int, end: int, limits: Limits, instruction: Sequence[int]) -> int:
    """Return the most tokens, of the request and of a part, that a reading has in the request's blocks at once. The
    arguments are those of longest_part."""
    longest = max(1, longest_part(reads, end, limits, instruction))
    return end + len(instruction) + (min(longest, end) if end <= longest else CUE + longest)


def check_room(where: str, policy: CachePolicy, prompt: int, limits: Limits, instruction: Sequence[int]) -> None:
    """Raise RequestError for a prompt that leaves no room for the second reading that a policy needs.

    Args:
        where: Names the prompt in errors.
        policy: That of the request's caches.
        prompt: Number of tokens of the prompt.
        limits: Limits of the engine's steps and sequences.
        instruction: Tokens that each part begins with.
    """
    end, cut = next(policy.all_cuts(prompt), (0, Cut(())))
    least = min(limits.block_size, cut.reads)
    if not least or longest_part(cut.reads, end, limits, instruction) >= least:
        return
    room, wanted = min(limits.max_batch_tokens, limits.max_model_len - end), len(instruction) + CUE + least
    raise RequestError(
        f"{where} has {prompt} tokens, and {policy.shown} reads the first {end} again, in parts of {wanted} tokens or "
        f"more, but there is room for {room}",
        at=f"kv_compression={policy.shown}",
        fix=f"give a shorter prompt, or build with max_model_len={end + wanted} and max_batch_tokens={wanted} or more",
    )
