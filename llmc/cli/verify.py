"""`llmc verify`: compare an engine's results with those of its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from llmc.cli.completion import complete_executors
from llmc.cli.model_argument import model_option
from llmc.cli.opening_options import OpeningOptions
from llmc.cli.output_file import check_output, write_output
from llmc.cli.status_line import status_line
from llmc.cli.table import FittingTable, facts, standard_output
from llmc.cli.told_progress import told
from llmc.debug.sample_tokens import PROSE, read_text
from llmc.errors import LlmcError, OptionError
from llmc.plural import counted

if TYPE_CHECKING:
    from llmc.debug.allowed_difference import Allowed
    from llmc.debug.compare import Comparison
    from llmc.runtime.engine import Engine

ORACLES = {"hf": "Hugging Face fp32", "onnxruntime": "onnxruntime fp32"}


def verify(
    engine: Annotated[Path, typer.Argument(help="engine directory")],
    against: Annotated[
        Path, model_option("model that it was built from: a Hugging Face directory or name, or a .gguf file")
    ],
    perplexity: Annotated[
        Path | None, typer.Option(help="text file: compare only perplexities, over all of it")
    ] = None,
    max_ratio: Annotated[
        float | None, typer.Option(help="maximum ratio of the engine's perplexity to the model's; default: none")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="write the perplexities to a file, for `llmc report --perplexity`")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="text file to run on; default: prose that comes with llmc")] = None,
    length: Annotated[int, typer.Option(help="tokens per sequence", min=2)] = 256,
    sequences: Annotated[int, typer.Option(help="number of sequences", min=1)] = 4,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help=(
                "maximum difference of logits divided by their standard deviation; default: from Hugging Face's own "
                "difference in the dtype"
            )
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of token ids for a model without a tokenizer")] = 0,
    oracle: Annotated[
        str, typer.Option(help="hf, or onnxruntime: run the model's graph and every stage of the passes there")
    ] = "hf",
    executor: Annotated[
        str | None,
        typer.Option(
            help="executor of the engine: ptx executes a GPU engine's kernels here; default: the engine's own",
            autocompletion=complete_executors,
        ),
    ] = None,
) -> None:
    """Compare an engine's logits with those of its model in fp32 on the CPU, computed by Hugging Face or onnxruntime.

    A 16-bit engine may differ from fp32 as much as Hugging Face in the same dtype does, with a margin.
    """
    from llmc.debug.allowed_difference import allowed_difference

    opening = OpeningOptions(executor=executor)
    opening.check()
    check_output(json)
    if oracle not in ORACLES:
        raise OptionError(f"{oracle!r} is not an oracle", at=f"--oracle {oracle}", fix=f"oracles: {', '.join(ORACLES)}")
    if perplexity is not None:
        compare_perplexities(engine, opening, against, perplexity, length, max_ratio, json)
        return
    if json is not None:
        raise OptionError("--json writes perplexities only", at=f"--json {json}", fix="name a text: --perplexity TEXT")
    with opening.open(engine) as opened:
        batch = token_sequences(opened, text, min(length, opened.limits.max_model_len), sequences, seed)
        result, own = _compared(opened, against, oracle, batch)
        in_the_middle = opened.info.dtype != "float32" and has_experts(opened)
        allowed = allowed_difference(opened.manifest, own)
    if tolerance is not None:
        allowed = replace(allowed, largest=tolerance, in_the_middle=tolerance, why="--tolerance")
    standard_output().print(comparison_table(result, allowed, ORACLES[oracle], own, in_the_middle=in_the_middle))
    _refuse_beyond(engine, *judgement(result, allowed, in_the_middle=in_the_middle))


def _compared(
    opened: Engine, against: Path, oracle: str, batch: list[list[int]]
) -> tuple[Comparison, Comparison | None]:
    """Compare the engine with the fp32 oracle, and Hugging Face in the engine's 16-bit dtype with it (None if not
    needed)."""
    from llmc.cli.second_opinion import opinion_on_stages
    from llmc.debug.compare import LogitFunction, compare_each
    from llmc.debug.hf_oracle import hf_logits

    dtype, models = opened.info.dtype, list[LogitFunction]([opened.logits])
    if oracle == "hf":
        longest = opened.limits.max_model_len
        reference = hf_logits(against, longest=longest)
        models += [hf_logits(against, dtype, longest=longest)] if dtype != "float32" else []
    else:
        reference = opinion_on_stages(opened, against, batch[0])
    with status_line(f"comparing {counted(len(batch), 'sequence')}"):
        result, *own = compare_each(models, reference, batch)
    return result, own[0] if own else None


def _refuse_beyond(engine: Path, judged: float, most: float) -> None:
    """Raise LlmcError if the logits differ by more than the tolerance, in units of their spread."""
    if not judged <= most:
        raise LlmcError(
            f"the engine's logits differ by {judged:.2g} of their spread; {most:.2g} is allowed",
            at=engine,
            fix="find the pass that causes it: llmc build MODEL --check-passes, or allow more with --tolerance",
        )


def compare_perplexities(
    engine: Path,
    opening: OpeningOptions,
    against: Path,
    text: Path,
    length: int,
    max_ratio: float | None,
    json: Path | None,
) -> None:
    """Perplexity of the engine and of the model in its checkpoint's dtype, unquantized, over windows of a text.

    json: File for the perplexities, or None.

    Raises LlmcError if the ratio is above `max_ratio`.
    """
    from rich.progress import Progress

    from llmc.debug.compare import Perplexity
    from llmc.debug.hf_oracle import hf_logits
    from llmc.engine_format import read_engine
    from llmc.report.measured_perplexity import measured_perplexity, perplexity_json

    with opening.open(engine) as opened:
        longest = min(length, opened.limits.max_model_len)
        windows = token_sequences(opened, text, longest, None, 0)
        reference = hf_logits(against, opened.info.dtype, longest=opened.limits.max_model_len)
        ours, theirs = Perplexity(), Perplexity()
        bars = Progress(console=Console(stderr=True))
        with told(bars):
            for tokens in bars.track(windows, description="perplexity"):
                ours.add(opened.logits(tokens), tokens)
                theirs.add(reference(tokens), tokens)
        dtype = opened.info.dtype
    ratio = ours.value / theirs.value
    table = facts(f"perplexity over {counted(ours.tokens, 'token')}", right=True)
    table.add_row("engine", f"{ours.value:.4f}")
    table.add_row(f"model, unquantized, {dtype}", f"{theirs.value:.4f}")
    table.add_row("ratio", f"{ratio:.4f}")
    standard_output().print(table)
    if json is not None:
        manifest = read_engine(engine, check_weights=False).manifest
        measured = measured_perplexity(manifest, text, longest, ours.tokens, ours.value, theirs.value)
        write_output(json, perplexity_json(measured))
    if max_ratio is not None and not ratio <= max_ratio:
        raise LlmcError(
            f"the engine's perplexity is {ratio:.4f} times the model's; {max_ratio} is allowed",
            at=engine,
            fix="quantize less: int4-gptq instead of int4, or --quantize auto:5 to see which weights matter",
        )


def token_sequences(engine: Engine, text: Path | None, length: int, count: int | None, seed: int) -> list[list[int]]:
    """Return at most `count` sequences of `length` tokens of the text, each with the special tokens that the tokenizer
    puts before a text. count: None takes all. Without a text, llmc's own prose is used.

    A model without a tokenizer is given ids drawn evenly from its vocabulary.
    """
    import numpy as np

    from llmc.debug.compare import windows

    if text is None and not engine.tokenizer.exists:
        generator = np.random.default_rng(seed)
        return [generator.integers(0, engine.info.vocab_size, length).tolist() for _ in range(count or 1)]
    tokens = engine.tokenize(PROSE if text is None else read_text(text))
    pieces = windows(tokens, length, count, engine.tokenizer.prefix)
    if not pieces:
        raise OptionError("the text has fewer than two tokens", at=text, fix="name a longer text file")
    return pieces


def has_experts(engine: Engine) -> bool:
    """Whether a router assigns tokens to experts. Rounding may change the expert of near ties."""
    import llmc.ops  # noqa: F401  (registers the ops)
    from llmc.engine_format.reader import GRAPHS
    from llmc.graph.op_record import RECORDS
    from llmc.graph.render import op_name

    # The graph after the last pass, not the program's launches, because the target `reference` has no launches.
    graphs = engine.files.below(GRAPHS)
    products = [f"{op_name(record.overload)}(" for record in RECORDS.values() if record.is_of_experts]
    return bool(graphs) and any(product in engine.files.text(graphs[-1]) for product in products)


def judgement(result: Comparison, allowed: Allowed, *, in_the_middle: bool) -> tuple[float, float]:
    """The difference that is judged, and its limit."""
    if in_the_middle:
        return result.relative_in_the_middle, allowed.in_the_middle
    return result.relative_difference, allowed.largest


def comparison_table(
    result: Comparison,
    allowed: Allowed,
    reference: str,
    own: Comparison | None = None,
    *,
    in_the_middle: bool = False,
) -> FittingTable:
    """Print the figures and the verdict. own: Hugging Face's difference in the engine's dtype. in_the_middle: Whether
    to judge the median token, because a router may send single tokens to other experts."""
    table = facts(f"engine against {reference}, {counted(result.tokens, 'token')}", right=True)
    judged, most = judgement(result, allowed, in_the_middle=in_the_middle)
    good = judged <= most
    verdict = Text(
        f"{judged:.2e}, {'ok' if good else 'too large'} (≤ {most:.2g}: {allowed.why})",
        style="green" if good else "bold red",
    )
    table.add_row("max |Δlogit|", f"{result.max_difference:.3e}")
    table.add_row("mean |Δlogit|", f"{result.mean_difference:.3e}")
    table.add_row("spread of the logits (σ)", f"{result.spread:.3f}")
    if in_the_middle:
        table.add_row("max |Δlogit| / spread", f"{result.relative_difference:.2e}, not judged: near ties of the router")
        table.add_row("the same of the token in the middle", verdict)
    else:
        table.add_row("max |Δlogit| / spread", verdict)
    if own is not None:
        theirs = own.relative_in_the_middle if in_the_middle else own.relative_difference
        table.add_row("the same of Hugging Face in the dtype", f"{theirs:.2e}")
    table.add_row("top-1 agreement", f"{result.top1_agreement:.2%}")
    table.add_row("perplexity, engine", f"{result.perplexity:.4f}")
    table.add_row("perplexity, model", f"{result.reference_perplexity:.4f}")
    return table
