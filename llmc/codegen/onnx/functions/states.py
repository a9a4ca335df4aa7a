"""Ops that carry a state from token to token: causal_conv, selective_scan, linear_attention, linear_recurrence.

Each function implements two ops, one for a single sequence and one for a step. `step` holds the step's state,
query_starts, context_lens and state_slots, the arguments of StepSequences.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from llmc.codegen.onnx.function_body import END, Body, Value
from llmc.codegen.onnx.functions.sequences import behind, scan, sequences

llmc = torch.ops.llmc


def causal_conv(b: Body, x: Value, weight: Value, bias: Value | None, **step: Value) -> tuple[str, ...]:
    """Convolve all tokens at once: a sum of rows, each `width - 1 - j` places back."""
    width = weight.size(0)
    of = sequences(b, x, (width - 1, weight.size(1)), step)
    rows = b("Concat", of.before, of.rows(x), axis=1)
    y = None if bias is None else bias.name
    for j in range(width):
        end = END if j == width - 1 else j + 1 - width
        term = b("Mul", b("Gather", weight, b.integer(j), axis=0), b.slice(rows, 1, j, end))
        y = term if y is None else b("Add", y, term)
    assert y is not None
    return of.results(y, behind(b, of, rows, width - 1))


def selective_scan(b: Body, x: Value, dt: Value, A: Value, B: Value, C: Value, **step: Value) -> tuple[str, ...]:
    """Rows of dt, x and B are matrices of one row, and those of C columns."""

    def rule(inner: Body, before: str, rows: Sequence[str]) -> tuple[str, str]:
        times, added, b_row, c_column = rows
        kept = inner("Exp", inner("Mul", times, A))
        after = inner("Add", inner("Mul", kept, before), inner("Mul", added, b_row))
        return after, inner.squeeze(inner("MatMul", after, c_column), 2)

    of = sequences(b, x, (A.size(0), A.size(1)), step)
    steps = of.rows(dt)
    times, added = b.unsqueeze(steps, 3), b.unsqueeze(b("Mul", steps, of.rows(x)), 3)
    return scan(b, of, rule, [times, added, b.unsqueeze(of.rows(B), 2), b.unsqueeze(of.rows(C), 3)], 3)


def linear_attention(
    b: Body, q: Value, k: Value, v: Value, decay: Value, beta: Value | None, **step: Value
) -> tuple[str, ...]:
    """Rows of q, k and v are matrices of one row, and those of decay columns."""

    def rule(inner: Body, before: str, rows: Sequence[str]) -> tuple[str, str]:
        q_row, k_row, added, kept, *betas = rows
        state = inner("Mul", kept, before)
        for beta_row in betas:
            added = inner("Mul", beta_row, inner("Sub", added, inner("MatMul", k_row, state)))
        after = inner("Add", state, inner("Mul", inner.transpose(k_row, 0, 1, 3, 2), added))
        return after, inner.squeeze(inner("MatMul", q_row, after), 2)

    heads = v.size(1)
    of = sequences(b, q, (heads, k.size(2), v.size(2)), step)
    inputs = [b.unsqueeze(of.rows(_repeated(b, tensor, heads)), 3) for tensor in (q, k)]
    inputs.append(b.unsqueeze(of.rows(v), 3))
    kept = b("Exp", of.rows(decay))
    inputs.append(b.unsqueeze(kept, *((3, 4) if len(decay.shape) == 2 else (4,))))
    if beta is not None:
        inputs.append(b.unsqueeze(of.rows(beta), 3, 4))
    return scan(b, of, rule, inputs, 4)


def _repeated(b: Body, x: Value, heads: int) -> str:
    """[tokens, groups, …] as [tokens, heads, …]: each group is repeated for its consecutive heads."""
    groups, width = x.size(1), x.size(2)
    if heads == groups:
        return x.name
    wide = b("Expand", b.unsqueeze(x, 2), b.integers([1, 1, heads // groups, 1]))
    return b.reshape(wide, -1, heads, width)


def linear_recurrence(
    b: Body, x: Value, decay: Value, initial: float, tropical: bool, **step: Value
) -> tuple[str, ...]:
    """Compute a linear recurrence, over max and + if it is tropical."""
    of = sequences(b, x, (x.size(1),), step, initial)
    rule = partial(_channel_rule, *(("Add", "Max") if tropical else ("Mul", "Add")))
    return scan(b, of, rule, [of.rows(x), of.rows(decay)], 2)


def _channel_rule(times: str, plus: str, inner: Body, before: str, rows: Sequence[str]) -> tuple[str, str]:
    """Return the names of y and of the state after a token, over these two operations. before: the state before it."""
    x, decay = rows
    return inner(plus, inner(times, decay, before), x), before


FUNCTIONS: dict[Any, Any] = {
    **dict.fromkeys((llmc.causal_conv.default, llmc.causal_conv_with_state.default), causal_conv),
    **dict.fromkeys((llmc.selective_scan.default, llmc.selective_scan_with_state.default), selective_scan),
    **dict.fromkeys((llmc.linear_attention.default, llmc.linear_attention_with_state.default), linear_attention),
    **dict.fromkeys((llmc.linear_recurrence.default, llmc.linear_recurrence_with_state.default), linear_recurrence),
}
