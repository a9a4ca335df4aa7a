"""A draft model's engine, and whether it fits the engine that it drafts for."""

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from llmc.engine_format import EngineDirectory
from llmc.engine_format.reader import engine_to_run
from llmc.engine_format.weight_check import WeightCheck
from llmc.errors import LlmcError, OptionError
from llmc.program import Program
from llmc.runtime.text.tokenizer import TOKENIZER_NAME, Tokenizer


@dataclass(frozen=True)
class SecondEngine:
    """A drafting engine, or a layer of one. check: the running check of its weights."""

    directory: EngineDirectory
    check: WeightCheck | None

    @property
    def programs(self) -> tuple[Program, ...]:
        """Its single program, which determines the memory of its cache."""
        return (self.directory.program,)

    def close(self) -> None:
        """Release the engine without opening it."""
        if self.check is not None:
            self.check.cancel()


def start_second(path: Path, first: EngineDirectory, *, check_weights: bool) -> SecondEngine:
    """The engine at the path, as a drafter for the first one. Raises EngineFormatError, or OptionError if it does not
    fit."""
    second = SecondEngine(*engine_to_run(path, check_weights=check_weights))
    try:
        _check_limits(second.directory, first)
        _check_vocabulary(second.directory, first)
    except LlmcError:
        second.close()
        raise
    return second


def _check_limits(second: EngineDirectory, first: EngineDirectory) -> None:
    ours, theirs = first.program.limits, second.program.limits
    if ours.block_size != theirs.block_size:
        raise OptionError(
            f"the draft model has blocks of {theirs.block_size} positions, the model of {ours.block_size}",
            at=second.path,
            fix=f"rebuild the draft model with block_size={ours.block_size}",
        )
    if theirs.max_model_len < ours.max_model_len:
        raise OptionError(
            f"the draft model has sequences of {theirs.max_model_len} tokens, the model of {ours.max_model_len}",
            at=second.path,
            fix=f"rebuild the draft model with max_model_len={ours.max_model_len}, or the model with "
            f"{theirs.max_model_len}",
        )


def _check_vocabulary(second: EngineDirectory, first: EngineDirectory) -> None:
    """Check that token ids mean the same in both."""
    differs = _difference(second, first)
    if differs is not None:
        raise OptionError(
            f"the draft model has another vocabulary: {differs}",
            at=second.path,
            fix="draft with a model of the same family, which has the same tokenizer",
        )


def _difference(second: EngineDirectory, first: EngineDirectory) -> str | None:
    ours, theirs = first.program.vocab_size, second.program.vocab_size
    records = [engine.files.records.get(TOKENIZER_NAME) for engine in (second, first)]
    if None not in records and records[0] != records[1]:
        for index, (its, own) in enumerate(
            zip_longest(*(Tokenizer(engine.files).tokens() for engine in (second, first)))
        ):
            if its != own:
                return f"token {index} is {its!r}, the model's {own!r}"
    if ours != theirs:
        return f"it has {theirs} tokens, the model {ours}: the first that only one has is {min(ours, theirs)}"
    return None
