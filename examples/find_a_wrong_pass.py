"""Find a wrong pass: plant a norm with a wrong epsilon in one layer, and let diff and bisect name it.

    python examples/find_a_wrong_pass.py [MODEL]

The same from the command line:

    llmc diff MODEL --dtype float32 --passes-from examples/find_a_wrong_pass.py:wrong_norm
    llmc bisect MODEL --dtype float32 --passes-from examples/find_a_wrong_pass.py:wrong_norm -o found
    python found/repro.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from llmc.debug.bisect import Pipeline, bisect, cut_graph, outline, with_made_nodes
from llmc.debug.cut_checks import LogitCheck
from llmc.debug.memo_run import MemoRun, default_chunks
from llmc.debug.pass_diff import diff_passes
from llmc.debug.region import changed_region
from llmc.debug.reproduction import title, write_reproduction
from llmc.debug.sample_tokens import sample_tokens
from llmc.frontends.capture import capture
from llmc.options import BuildOptions
from llmc.passes import Match, Rewrite, extended

EPSILON = 0.1


def norm(x: Any, weight: Any, eps: Any) -> Any:
    return torch.ops.llmc.rms_norm.default(x, weight, eps)


def wrong(x: Any, weight: Any, eps: float) -> Any:
    return torch.ops.llmc.rms_norm.default(x, weight, EPSILON)


def in_one_layer(match: Match) -> bool:
    return "layers_1_input" in match.bound["weight"].name and match.bound["eps"] != EPSILON


wrong_norm = Rewrite("wrong_norm", (norm,), wrong, applies=in_one_layer, after="check_canonical")


def main(model: Path) -> None:
    options = BuildOptions(dtype="float32")  # In fp32 nothing hides behind rounding.
    captured = capture(model, options)
    passes = extended(wrong_norm)
    tokens = sample_tokens(model / "tokenizer.json", captured.graph.info.vocab_size)

    found = diff_passes(captured, passes, options, tokens)
    assert found.first_over is not None
    print(f"diff: {found.first_over.name} is the first pass over its budget of {found.first_over.budget:.0e}")

    runner = MemoRun(captured.source, tokens, chunk_sizes=default_chunks(len(tokens)), block_size=options.block_size)
    pipeline = Pipeline(captured, passes, options)
    check = LogitCheck(pipeline, runner, runner.logits(captured.graph), tolerance=1e-4)
    culprit = bisect(outline(pipeline), check)
    print(f"bisect: {title(culprit)}, found in {len(culprit.probes)} runs")

    before, after = cut_graph(pipeline, culprit.good), cut_graph(pipeline, culprit.bad)
    culprit = with_made_nodes(culprit, after)
    with tempfile.TemporaryDirectory() as directory:
        piece = changed_region(before, after, runner, captured.source)
        again = ["llmc", "bisect", str(model), "--at", str(culprit.bad)]
        made = write_reproduction(Path(directory) / "found", culprit, before, after, piece, again)
        shown = subprocess.run([sys.executable, made.directory / "repro.py"], capture_output=True, text=True)
        print(f"repro.py:\n{shown.stdout}", end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "models" / "bard-draft")
