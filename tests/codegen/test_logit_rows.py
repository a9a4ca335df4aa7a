"""A graph with logits of all tokens is refused, since an engine's buffer holds those of the rows asked for only."""

from __future__ import annotations

import pytest

from llmc.codegen.target_kind import kind_of
from llmc.errors import LoweringError
from llmc.options import BuildOptions
from llmc.passes.pipeline import serving
from llmc.passes.runner import run_pipeline
from llmc.targets import resolve_target
from tests.graph_builder import llama


@pytest.mark.parametrize(
    "options",
    [BuildOptions(disable_passes=("select_logit_rows",)), BuildOptions(stop_after=2)],
    ids=["disabled", "cut"],
)
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_refuses_logits_of_every_token(options: BuildOptions, target: str) -> None:
    graph, _ = llama(layers=1)
    served = run_pipeline(graph, serving(), options).graph
    kind = kind_of(resolve_target(target))
    with (
        kind.builder(options) as builder,
        pytest.raises(LoweringError, match=r"float32\[T, 17\], but an engine has room only for") as caught,
    ):
        builder.lower(served)
    assert caught.value.fix is not None
    assert "select_logit_rows" in caught.value.fix
