"""The session of `llmc bisect`: the captured model, its pipeline, and the check that the user chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from llmc.cli.model_argument import model_option
from llmc.cli.model_options import ModelOptions
from llmc.cli.target_option import tokens_for
from llmc.debug.sample_tokens import Sample, sample_tokens
from llmc.engine_format.manifest import is_engine
from llmc.errors import OptionError
from llmc.options import BuildOptions
from llmc.plural import counted

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmc.debug.bisect import Check, Outline, Pipeline
    from llmc.debug.memo_run import MemoRun
    from llmc.passes.rewrite import Pass


ORACLE = "onnxruntime"


@dataclass(frozen=True)
class Asked:
    """The options that select the check."""

    check: Annotated[
        str | None,
        Option(help="shell command that exits with 0 for a good cut: {engine} {graph} {logits} {number}"),
    ] = None
    against: Annotated[
        Path | None, model_option("model or engine whose logits are right; default: the captured graph")
    ] = None
    tolerance: Annotated[
        float | None, Option(help="maximum difference of logits divided by their standard deviation; default: by dtype")
    ] = None
    slower_than: Annotated[
        float | None, Option(help="find the rewrite that makes a decode step this many times slower")
    ] = None
    oracle: Annotated[str | None, Option(help="onnxruntime: find the first rewrite after which its results differ")] = (
        None
    )

    def validate(self) -> None:
        """Raise OptionError for two checks at once, or a figure out of range."""
        names = {"--check": self.check, "--against": self.against, "--slower-than": self.slower_than}
        chosen = [name for name, value in {**names, "--oracle": self.oracle}.items() if value is not None]
        if len(chosen) > 1:
            raise OptionError(f"{' and '.join(chosen)} cannot be combined", at=chosen[1], fix="give one")
        if self.tolerance is not None and (self.check is not None or self.slower_than is not None):
            raise OptionError(
                "--tolerance applies to logits only", at="--tolerance", fix=f"leave it out with {chosen[0]}"
            )
        for name, value in (("--tolerance", self.tolerance), ("--slower-than", self.slower_than)):
            if value is not None and not 0 <= value < float("inf"):
                raise OptionError(f"{name} cannot be {value}", at=name, fix="give a number from 0 on")
        if self.oracle not in (None, ORACLE):
            raise OptionError(f"{self.oracle!r} is not an oracle", at=f"--oracle {self.oracle}", fix=f"name {ORACLE}")
        if self.check is not None and not self.check.strip():
            raise OptionError("the command is empty", at="--check", fix="give a shell command")

    @property
    def needs_engine(self) -> bool:
        """Whether cuts are built into engines: not all cuts can be, but only engines have a speed."""
        engine = self.check is not None and ("{engine}" in self.check or "LLMC_BISECT_ENGINE" in self.check)
        return self.slower_than is not None or engine


@dataclass(frozen=True)
class Session:
    """A model's pipeline, and the check. uncut: passes that every cut needs whole."""

    pipeline: Pipeline
    runner: MemoRun
    whole: Outline
    check: Check
    uncut: frozenset[str]


def open_session(
    model: Path,
    chosen: ModelOptions,
    sample: Sample,
    asked: Asked,
    target: str,
    good: int,
    scratch: Path,
    progress: Callable[[str], None],
) -> Session:
    from llmc.debug.bisect import Pipeline, outline
    from llmc.debug.memo_run import MemoRun, default_chunks
    from llmc.engine_format.manifest import MANIFEST_NAME
    from llmc.frontends.capture import capture
    from llmc.passes.pipeline import essential

    if (model / MANIFEST_NAME).exists():
        raise OptionError(
            "an engine's passes cannot be run again", at=model, fix="name the model directory that it was built from"
        )
    options, passes = chosen.parse(), chosen.passes()
    captured = capture(model, options)
    pipeline = Pipeline(captured, passes, options, progress, tokens_for(target))
    info = captured.graph.info
    ids = sample_tokens(model / "tokenizer.json", info.vocab_size, sample, info.max_positions)
    runner = MemoRun(captured.source, ids, chunk_sizes=default_chunks(len(ids)), block_size=options.block_size)
    whole = outline(pipeline)
    check = _check(asked, pipeline, whole, runner, partial(_build, model, target, passes, options), good, scratch)
    return Session(pipeline, runner, whole, check, essential() if asked.needs_engine else frozenset())


def _check(
    asked: Asked, pipeline: Pipeline, whole: Outline, runner: MemoRun, build: Any, good: int, scratch: Path
) -> Check:
    import torch

    from llmc.codegen.onnx.installed import require_onnx
    from llmc.debug.allowed_difference import TOLERANCE
    from llmc.debug.cut_checks import CommandCheck, LogitCheck, SpeedCheck
    from llmc.debug.difference import BUDGETS
    from llmc.debug.second_opinion import LARGEST_DIFFERENCE, OpinionCheck
    from llmc.graph.dtype_names import torch_name
    from llmc.passes.rewrite import Numerics

    if asked.slower_than is not None:
        return SpeedCheck(build, runner.tokens, asked.slower_than, good, scratch)
    if asked.check is not None:
        return CommandCheck(asked.check, pipeline, runner, build if asked.needs_engine else None)
    captured = pipeline.captured.graph
    dtype = captured.info.dtype
    if asked.oracle is not None:
        require_onnx(f"--oracle {asked.oracle}", ORACLE)
        fp32 = dtype is torch.float32
        usual = LARGEST_DIFFERENCE if fp32 else TOLERANCE[torch_name(dtype)]
        return OpinionCheck(pipeline, runner, usual if asked.tolerance is None else asked.tolerance)
    if asked.against is None:
        reference = runner.logits(captured)
    else:
        reference = _reference(asked.against, runner.tokens, pipeline.options.max_model_len)
    vocabulary = captured.info.vocab_size
    if reference.shape[-1] != vocabulary:
        raise OptionError(
            f"the reference has {counted(reference.shape[-1], 'token')} in its vocabulary, the model {vocabulary}",
            at=f"--against {asked.against}",
            fix="name the model that this one should agree with",
        )
    if asked.tolerance is not None:
        allowed = asked.tolerance
    elif asked.against is not None:
        allowed = _own(asked.against, runner.tokens, reference, dtype, pipeline.options.max_model_len)
    else:
        allowed = BUDGETS[Numerics.REORDER, dtype]
    lossy = whole.lossy(dtype) if asked.tolerance is None else ()
    return LogitCheck(pipeline, runner, reference, allowed, lossy)


def _reference(against: Path, tokens: Sequence[int], longest: int | None) -> Tensor:
    import torch

    from llmc.debug.hf_oracle import hf_logits
    from llmc.runtime.loading import load

    if is_engine(against):
        with load(against) as engine:
            return torch.from_numpy(engine.logits(tokens).copy())
    return torch.from_numpy(hf_logits(against, longest=longest)(tokens))


def _own(against: Path, tokens: Sequence[int], reference: Tensor, dtype: torch.dtype, longest: int | None) -> float:
    """The tolerated difference of a graph in the dtype from an fp32 reference; for Hugging Face's model, the model's
    own difference."""
    import torch

    from llmc.debug.allowed_difference import TIMES_OWN, TOLERANCE
    from llmc.debug.difference import difference
    from llmc.debug.hf_oracle import hf_logits
    from llmc.graph.dtype_names import torch_name

    if dtype is torch.float32 or is_engine(against):
        return TOLERANCE[torch_name(dtype)]
    own = torch.from_numpy(hf_logits(against, torch_name(dtype), longest=longest)(tokens))
    return TIMES_OWN * difference(own, reference).relative


def _build(model: Path, target: str, passes: Sequence[Pass], options: BuildOptions, number: int, path: Path) -> None:
    from llmc.compiler import build

    changed = {**options.model_dump(), "stop_after": number, "finish_cut": True}
    build(model, path, target=target, passes=passes, **changed)
