"""The sequences whose tokens an op with states processes in order: one whole sequence, or a step's requests.

Either way tokens are rows [requests, most, …], which requests take side by side, and states [requests, …]: Scan goes
along the rows. A request that has fewer of them than another keeps its state in the rest.

In both cases: before: the initial states, [requests, …]. counts: tokens of each request, [requests, 1]. is_row: which
rows are tokens, [requests, most]; None if all are.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from onnx import TensorProto

from llmc.codegen.onnx.function_body import Body, InnerBody, Operand, Value
from llmc.codegen.onnx.functions.requests import padded, places


class OneSequence:
    """One sequence from its beginning. x: has its tokens. shape: shape of the state."""

    def __init__(self, b: Body, x: Value, shape: Sequence[int], initial: float = 0.0) -> None:
        self._b = b
        self.before = b.constant(np.full((1, *shape), initial, np.float32))
        self.counts = b.unsqueeze(b.length(x, 0), 0)
        self.is_row: str | None = None

    def rows(self, x: Operand) -> str:
        """[tokens, …] as [1, tokens, …]."""
        return self._b.unsqueeze(x, 0)

    def results(self, y: str, after: str) -> tuple[str, ...]:
        """Return y with one row per token. No state is written."""
        return (self._b.squeeze(y, 0),)


class StepSequences:
    """The requests of a step, whose states are in slots; a request's first tokens start from zero states."""

    def __init__(
        self,
        b: Body,
        x: Value,
        state: Value,
        query_starts: Value,
        context_lens: Value,
        state_slots: Value,
        initial: float = 0.0,
    ) -> None:
        self._b, self._state = b, state
        self._slots = b.cast(state_slots, torch.int64)
        starts, self.counts, rows = padded(b, query_starts)
        self._index, self._places = b("Add", starts, rows), places(b, x, query_starts, starts, rows)
        steps = b("Range", b.integer(0), b.squeeze(b.length(rows, 1), 0), b.integer(1))
        self.is_row: str | None = b("Less", b.unsqueeze(steps, 0), self.counts)
        lengths = b.unsqueeze(b.cast(context_lens, torch.int64), 1)
        has_state = b.reshape(b("Greater", lengths, self.counts), -1, *[1] * (len(state.shape) - 1))
        self.before = b("Where", has_state, b("Gather", state, self._slots, axis=0), b.number(initial))

    def rows(self, x: Operand) -> str:
        """[tokens, …] as [requests, most, …]. Rows that a request lacks repeat its last."""
        return self._b("Gather", x, self._index, axis=0)

    def results(self, y: str, after: str) -> tuple[str, ...]:
        """Return y with one row per token, and the states of all slots with the requests' new ones."""
        b = self._b
        flat = b("Reshape", y, b("Concat", b.integers([-1]), b("Shape", y, start=2), axis=0))
        tokens = b("Gather", flat, self._places, axis=0)
        return tokens, b("ScatterND", self._state, b.unsqueeze(self._slots, 1), after)


Sequences = OneSequence | StepSequences


def sequences(b: Body, x: Value, shape: Sequence[int], step: Mapping[str, Value], initial: float = 0.0) -> Sequences:
    """The requests of a step if its arguments are given, otherwise the sequence of x's tokens. shape: shape of the
    state."""
    return StepSequences(b, x, initial=initial, **step) if step else OneSequence(b, x, shape, initial)


# A body, the state before and one row of each input, all [requests, …] -> the state after, and y.
Rule = Callable[[Body, str, Sequence[str]], tuple[str, str]]


def scan(b: Body, sequences: Sequences, rule: Rule, inputs: Sequence[str], axes: int) -> tuple[str, ...]:
    """The results of an op that goes along its tokens by a rule. inputs: the rows of each input. axes: number of axes
    of the states, the axis of requests included."""
    inner = InnerBody()
    elements = [f"row_{index}" for index in range(len(inputs))]
    after, y = rule(inner, "before", elements)
    kinds = {"before": TensorProto.FLOAT, **dict.fromkeys(elements, TensorProto.FLOAT)}
    names = list(inputs)
    if sequences.is_row is not None:
        is_row = inner.unsqueeze("is_row", *range(1, axes))
        after = inner("Where", is_row, after, "before")
        kinds["is_row"] = TensorProto.BOOL
        names.append(sequences.is_row)
    body = inner.graph("token", kinds, {after: TensorProto.FLOAT, inner("Identity", y): TensorProto.FLOAT})
    state, outputs = b.several(
        "Scan",
        2,
        sequences.before,
        *names,
        body=body,
        num_scan_inputs=len(names),
        scan_input_axes=[1] * len(names),
        scan_output_axes=[1],
    )
    return sequences.results(outputs, state)


def behind(b: Body, sequences: Sequences, rows: str, count: int) -> str:
    """The last `count` of the rows that each request has seen. rows: `count` of them from before, then its own."""
    last = b("Add", sequences.counts, b.constant(np.arange(count)[None]))
    return b("GatherND", rows, b.unsqueeze(last, 2), batch_dims=1)
