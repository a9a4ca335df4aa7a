"""The steps in which launches are measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmc.program import Limits, Program, RowCount, RowRange

if TYPE_CHECKING:
    from llmc.runtime.device.inputs import StepShape

PREFILL_TOKENS = 512


def shape_of(only: RowRange | None, limits: Limits) -> StepShape:
    """The largest step with that many rows: single tokens if the limit of requests allows it, otherwise one prompt."""
    from llmc.runtime.device.inputs import StepShape

    columns = -(-limits.max_model_len // limits.block_size)
    is_logits = only is not None and only.rows is RowCount.LOGIT_ROWS
    most = limits.max_logit_rows if is_logits else min(limits.max_batch_tokens, limits.max_model_len)
    count = most if only is None or only.last is None else min(only.last, most)
    decodes = min(limits.max_sequences, limits.max_logit_rows)
    if count <= decodes:
        return StepShape(count, count, count, columns)
    return StepShape(count, count if is_logits else 1, 1, columns)


def steps_of(program: Program) -> tuple[StepShape, ...]:
    """A single decode, a full batch of them, the same with a request of two tokens, a prompt; then for each range of
    rows the largest step in it."""
    from llmc.runtime.device.inputs import StepShape

    limits = program.limits
    tokens = min(PREFILL_TOKENS, limits.max_batch_tokens, limits.max_model_len)
    columns = -(-limits.max_model_len // limits.block_size)
    batch = min(limits.max_sequences, limits.max_logit_rows, limits.max_batch_tokens)
    common = (
        StepShape(1, 1, 1, columns),
        StepShape(batch, batch, batch, columns),
        # A mixed step has launches for its decodes that the others do not have.
        *((StepShape(batch + 1, batch, batch, columns),) if 1 < batch < limits.max_batch_tokens else ()),
        StepShape(tokens, 1, 1, columns),
    )
    ranges = dict.fromkeys(launch.only for launch in program.launches)
    shapes = dict.fromkeys((*common, *(shape_of(only, limits) for only in ranges)))
    return tuple(with_inputs_of(program, shape) for shape in shapes)


def with_inputs_of(program: Program, shape: StepShape) -> StepShape:
    """The shape, extended by the optional inputs that a program reads: adapters of tokens, slots of states."""
    return replace(shape, adapters=program.adapters is not None, states=bool(program.states))
