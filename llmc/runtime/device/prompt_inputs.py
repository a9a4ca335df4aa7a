"""Steps with prompts padded to buckets: the same launches serve every step of a bucket, so that a graph can be one.

The tokens of the padding are one more request's, of token 0 at position 0, in a scratch block and a scratch slot of
states that no real request uses; further requests of the padding have no tokens. Rows of logits that are padding are
the first token's.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.prediction.prompt_buckets import range_ends, token_buckets
from llmc.program import ADAPTERS, HIDDEN, ROW_ADAPTERS, STATE_SLOTS, Limits, Program, RowCount, group_input
from llmc.runtime.device.inputs import LEAST_COLUMNS, StepShape
from llmc.runtime.loop.step import Step
from llmc.runtime.sampling.row_choice import BEST, RowChoices
from llmc.targets import GpuTarget

_OF_TOKENS = ("input_ids", "positions", "slot_mapping", "tree_masks", HIDDEN, ADAPTERS)
_OF_REQUESTS = ("context_lens", "block_tables", STATE_SLOTS)
_OF_ROWS = ("logit_rows", ROW_ADAPTERS)


@dataclass(frozen=True)
class PromptSizes:
    """The sizes of buckets, ascending: numbers of tokens, logit rows and requests."""

    tokens: tuple[int, ...]
    logit_rows: tuple[int, ...]
    requests: tuple[int, ...]

    def shape(self, step: Step, block_size: int) -> StepShape | None:
        """Return the shape of a step's bucket; None if it has none."""
        own = StepShape.of(step)
        tokens, rows = _least(self.tokens, own.tokens), _least(self.logit_rows, own.logit_rows)
        columns = max(LEAST_COLUMNS, 1 << (own.max_blocks - 1).bit_length())
        if tokens is None or rows is None or tokens - own.tokens > columns * block_size:
            return None
        requests = _least(self.requests, own.requests + (tokens > own.tokens))
        # A step of one token per request would be decodes, which have other launches.
        if requests is None or requests >= tokens:
            return None
        return StepShape(tokens, rows, requests, columns, own.hidden, own.adapters, own.states, own.groups)


def prompt_sizes(program: Program, target: GpuTarget) -> PromptSizes:
    """Return the buckets of a program on a GPU. No step has one if graphs save nothing."""
    limits, most = program.limits, program.limits.max_sequences
    row_ends = {end for end in range_ends(program, RowCount.LOGIT_ROWS) if 0 < end < limits.max_logit_rows}
    return PromptSizes(
        token_buckets(program, target),
        tuple(sorted({0, limits.max_logit_rows, *row_ends, *_doubled(1, limits.max_logit_rows)})),
        tuple(sorted({most, *_doubled(2, most), *_doubled(3, most)})),
    )


class PromptInputs:
    """Writes padded steps into `memory`, which other steps may also use.

    scratch_blocks: the block for padding in each group of caches. scratch_slot: the slot of states for padding.
    """

    def __init__(
        self,
        limits: Limits,
        sizes: PromptSizes,
        memory: npt.NDArray[np.uint8],
        scratch_blocks: Sequence[int],
        scratch_slot: int,
    ) -> None:
        self._sizes, self._block_size, self._memory = sizes, limits.block_size, memory
        self._scratch_blocks, self._scratch_slot = scratch_blocks, scratch_slot

    def write(self, step: Step, choices: RowChoices | None) -> StepShape | None:
        """Write a step and its padding. Returns the shape of its bucket, or None, and nothing is written, if it has
        none.

        choices: How rows are chosen, for a step that chooses tokens.
        """
        shape = self._sizes.shape(step, self._block_size)
        if shape is None:
            return None
        offsets = shape.input_offsets()
        for name, count, values, padding in self._padded(step, shape, choices):
            size = (count, shape.max_blocks) if name.startswith("block_tables") else (count, *values.shape[1:])
            start, nbytes = offsets[name], math.prod(size) * values.itemsize
            view = self._memory[start : start + nbytes].view(values.dtype).reshape(size)
            view[len(values) :] = padding
            if view.ndim > 1:
                view[: len(values), values.shape[1] :] = padding
                view[: len(values), : values.shape[1]] = values
            else:
                view[: len(values)] = values
        return shape

    def _padded(
        self, step: Step, shape: StepShape, choices: RowChoices | None
    ) -> Iterator[tuple[str, int, npt.NDArray[np.generic], npt.ArrayLike]]:
        """Yield each input: its name, its number of rows in the bucket, its values, and those of the other rows."""
        extra = shape.tokens - len(step.input_ids)
        inside = np.arange(extra) % self._block_size
        lens = np.zeros(shape.requests - len(step.context_lens), np.int32)
        lens[:1] = extra
        counts = dict.fromkeys(_OF_TOKENS, shape.tokens) | dict.fromkeys(_OF_REQUESTS, shape.requests)
        counts |= dict.fromkeys(_OF_ROWS, shape.logit_rows) | {"query_starts": shape.requests + 1}
        for base, group, values in step.inputs_by_group():
            block = self._scratch_blocks[group]
            paddings: dict[str, npt.ArrayLike] = {
                "slot_mapping": block * self._block_size + inside,
                "query_starts": shape.tokens,
                "context_lens": lens,
                "block_tables": block,
                STATE_SLOTS: self._scratch_slot,
            }
            yield group_input(base, group), counts[base], values, paddings.get(base, 0)
        if choices is not None:
            for name, values in choices.arrays().items():
                yield name, shape.logit_rows, values, getattr(BEST, name)


def _least(sizes: Sequence[int], count: int) -> int | None:
    """Return the least of the ascending sizes that is at least `count`."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


def _doubled(first: int, end: int) -> Iterator[int]:
    """A number, doubled again and again, as long as it is less than `end`."""
    while first < end:
        yield first
        first *= 2
