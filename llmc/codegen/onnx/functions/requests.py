"""The tokens of a step as rows of its requests, side by side, and back."""

import torch
from onnx import TensorProto

from llmc.codegen.onnx.function_body import END, Body, Value


def padded(b: Body, query_starts: Value, *, least: int = 1) -> tuple[str, str, str]:
    """(starts, counts, rows): [requests, 1] twice, and the token of each padded row of the requests, [requests, most];
    int64. Missing rows repeat the request's last one. least: minimum number of rows."""
    bounds = b.cast(query_starts, torch.int64)
    starts = b("Slice", bounds, b.integers([0]), b.integers([-1]))
    ends = b("Slice", bounds, b.integers([1]), b.integers([END]))
    counts = b.unsqueeze(b("Sub", ends, starts), 1)
    most = b("Max", b("ReduceMax", counts, keepdims=0), b.integer(least))
    steps = b.unsqueeze(b("Range", b.integer(0), most, b.integer(1)), 0)
    rows = b("Max", b("Min", steps, b("Sub", counts, b.integer(1))), b.integer(0))
    return b.unsqueeze(starts, 1), counts, rows


def places(b: Body, x: Value, query_starts: Value, starts: str, rows: str) -> str:
    """The place of each token of x among the rows of all requests, [tokens]; anywhere for tokens of no request."""
    tokens = b("Range", b.integer(0), b.squeeze(b.length(x, 0), 0), b.integer(1))
    ends = b("Slice", b.cast(query_starts, torch.int64), b.integers([1]), b.integers([END]))
    is_behind = b("LessOrEqual", b.unsqueeze(ends, 0), b.unsqueeze(tokens, 1))
    request = b("ReduceSum", b("Cast", is_behind, to=TensorProto.INT64), b.integers([1]), keepdims=0)
    last = b("Sub", b.squeeze(b.length(starts, 0), 0), b.integer(1))
    request = b("Min", request, last)
    row = b("Sub", tokens, b("Gather", b.squeeze(starts, 1), request, axis=0))
    most = b.squeeze(b.length(rows, 1), 0)
    row = b("Max", b("Min", row, b("Sub", most, b.integer(1))), b.integer(0))
    return b("Add", b("Mul", request, most), row)
