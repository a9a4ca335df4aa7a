"""The line of the user's model is found in export's stack traces, and does not depend on where packages are."""

from __future__ import annotations

import pytest
from torch import fx

from llmc.graph.source_line import source_line

INNER = '  File "/site-packages/llama/modeling_llama.py", line 62, in forward'


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        (f'  File "a.py", line 1, in f\n    g(x)\n{INNER}\n    return x * 2\n',
         "llama/modeling_llama.py:62 in forward: return x * 2"),
        (INNER, "llama/modeling_llama.py:62 in forward"),
        ('File "/m.py", line 3, in g', "m.py:3 in g"),
        ("no frames here", None),
        (None, None),
    ],
)  # fmt: skip
def test_the_innermost_frame(trace: str | None, line: str | None) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    assert source_line(node) == line
