"""The table of `llmc verify --oracle onnxruntime`: every stage of the pipeline, run by onnxruntime and by llmc."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from llmc.cli.status_line import status_line
from llmc.cli.table import Column, FittingTable, numeric, standard_output
from llmc.cli.target_option import tokens_for
from llmc.errors import LlmcError
from llmc.plural import counted

if TYPE_CHECKING:
    from llmc.debug.compare import LogitFunction
    from llmc.debug.second_opinion import StageOpinion
    from llmc.runtime.engine import Engine


def opinion_on_stages(engine: Engine, model: Path, tokens: Sequence[int]) -> LogitFunction:
    """Print how onnxruntime's logits differ at each stage of an engine's pipeline, run again in fp32 from the model
    directory.

    Returns its logits of the captured graph, to compare the engine's with. Raises LlmcError for a stage that differs.
    """
    from llmc.codegen.onnx.installed import require_onnx
    from llmc.debug.bisect import Pipeline
    from llmc.debug.onnx_oracle import OnnxOracle
    from llmc.debug.second_opinion import LARGEST_DIFFERENCE, stage_opinions
    from llmc.exporter import in_single_precision
    from llmc.frontends.capture import capture
    from llmc.options import parse_options
    from llmc.passes.pipeline import default

    require_onnx("--oracle onnxruntime", "onnxruntime")
    built = {**engine.manifest.options, "dtype": "auto", "kv_dtype": "auto"}
    options = in_single_precision(parse_options(built))
    with status_line("capture") as tell:
        captured = capture(model, options)
        pipeline = Pipeline(captured, default(), options, tell, tokens_for(engine.manifest.target.name))
        tell("ask onnxruntime")
        opinions = list(stage_opinions(pipeline, tokens))
        oracle = OnnxOracle(captured.graph, captured.source)
    standard_output().print(opinions_table(opinions, len(tokens), LARGEST_DIFFERENCE))
    wrong = next((opinion for opinion in opinions if not opinion.difference.within(LARGEST_DIFFERENCE)), None)
    if wrong is not None:
        raise LlmcError(
            f"onnxruntime's logits of the {wrong.stage.value} graph differ by {wrong.difference.relative:.1e} of their "
            f"spread; {LARGEST_DIFFERENCE:.0e} is allowed",
            at=model,
            fix=f"find the first rewrite that causes it: llmc bisect {model} --oracle onnxruntime",
        )
    return lambda ids: oracle.logits(ids).numpy()


def opinions_table(opinions: Sequence[StageOpinion], tokens: int, allowed: float) -> FittingTable:
    columns = (Column("stage"), *numeric(("nodes", 1), "max |Δlogit| / spread", "top-1"))
    table = FittingTable(f"the same graphs in onnxruntime and in llmc, {counted(tokens, 'token')} in fp32", columns)
    for opinion in opinions:
        good = opinion.difference.within(allowed)
        verdict = Text(f"{opinion.difference.relative:.2e}", style="green" if good else "bold red")
        table.add_row(opinion.stage.value, str(opinion.nodes), verdict, f"{opinion.difference.top1:.2%}")
    return table
