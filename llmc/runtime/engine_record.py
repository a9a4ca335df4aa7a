"""Information about an engine without running it: its report page, its explanation, and predictions of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmc.engine_format import EngineDirectory
from llmc.engine_format.reader import EXPLANATION_NAME, REPORT_NAME
from llmc.errors import EngineFormatError, TargetError, bad_value
from llmc.targets import GPU_TARGETS

if TYPE_CHECKING:
    from llmc.prediction.device_step import StepPrediction

_CONTEXT = 1024


def report_file(directory: EngineDirectory) -> Path:
    """The HTML page. Raises EngineFormatError."""
    return _file(directory, REPORT_NAME)


def explanation(directory: EngineDirectory) -> str:
    """The text of `llmc explain`. Raises EngineFormatError."""
    _file(directory, EXPLANATION_NAME)
    return directory.files.text(EXPLANATION_NAME)


def predicted_step(
    directory: EngineDirectory, requests: int, context: int | None, prefill: int | None
) -> StepPrediction:
    """A step on the engine's first GPU. context: None for 1024, or the longest sequence.

    Raises TargetError for a CPU's engine, OptionError for a step beyond the engine's limits.
    """
    first = directory.whole_programs[0]
    target = next((target for target in GPU_TARGETS if target.name == first.target), None)
    if target is None:
        raise TargetError(
            f"steps of an engine for {first.target} are predicted from measurements of the machine",
            at=directory.path,
            fix=f"see them: llmc report {directory.path}; measure them: llmc profile {directory.path}",
        )
    limits = first.program.limits
    if context is None:
        context = min(_CONTEXT, limits.max_model_len)
    for name, value, most in (
        ("requests", requests, limits.max_sequences),
        ("context", context, limits.max_model_len),
        ("prefill", prefill, limits.max_batch_tokens),
    ):
        if not (value is None and name == "prefill") and (type(value) is not int or not 1 <= value <= most):
            raise bad_value(name, value, f"give a whole number 1 to {most}, as the engine was built")
    from llmc.prediction.device_step import predict_decode, predict_prefill  # imports torch

    if prefill is not None:
        return predict_prefill(first.program, target, prefill)
    return predict_decode(first.program, target, requests, context)


def _file(directory: EngineDirectory, name: str) -> Path:
    if name not in directory.manifest.files:
        raise EngineFormatError(
            f"the engine was written without its {name}",
            at=directory.path,
            fix="build it again: llmc build MODEL -o ENGINE",
        )
    return directory.path / name
