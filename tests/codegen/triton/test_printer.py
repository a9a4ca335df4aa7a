"""The text of a generated Triton loop, as people read it, with what it came from."""

from __future__ import annotations

from collections.abc import Callable

from llmc.codegen.triton.printer import print_loop
from tests.codegen.cpp.test_printer import NORM


def test_a_norm_per_head(golden: Callable[[str, str], None]) -> None:
    comment = "mul  (#3 fuse_something)\nmodel.py:12 in forward"
    golden("codegen/norm_loop_triton.txt", print_loop("loop_0_norm", NORM, comment))
