"""The engine inside an engine, of what drafts from its hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmc.engine_format import EngineDirectory
from llmc.engine_format.reader import DRAFT, DRAFT_IDS_NAME, read_engine, start_engine
from llmc.engine_format.weight_check import WeightCheck
from llmc.errors import EngineFormatError, OptionError
from llmc.files.typed_json import REBUILD
from llmc.program import HIDDEN, Program
from llmc.runtime.executors.executor import Executor
from llmc.runtime.executors.opening import ExecutorName, open_second
from llmc.runtime.speculation.config_values import OPTION
from llmc.runtime.speculation.draft_vocabulary import TokenIds, in_vocabulary


@dataclass(frozen=True)
class BuiltInDraft:
    """directory: of the inner engine; check: of its weights, under way. ids: the outer one's, one for each of its
    tokens; None where the vocabularies are the same. vocab_size: of the outer one."""

    directory: EngineDirectory
    check: WeightCheck | None
    ids: TokenIds | None
    vocab_size: int

    @property
    def program(self) -> Program:
        """What its cache takes of the memory follows from it."""
        return self.directory.program

    def open(self, blocks: int, threads: int, name: ExecutorName | None) -> Executor:
        """In the outer one's vocabulary. Raises TargetError."""
        executor = open_second(self.directory, blocks, threads, name, self.check)
        return in_vocabulary(executor, self.ids, self.vocab_size, self.program.limits.max_logit_rows)


def start_built_in(first: EngineDirectory, method: str, *, check_weights: bool) -> BuiltInDraft:
    """The engine's draft of that method. Raises OptionError if it has none, EngineFormatError for one that does not
    fit."""
    path = first.path / DRAFT
    if f"{DRAFT}/manifest.json" not in first.files:
        raise OptionError(
            f"the engine was built without a draft for the method {method!r}",
            at=OPTION,
            fix="build it with one: llmc build MODEL --speculative DIRECTORY, or mtp",
        )
    if check_weights:
        directory, check = start_engine(path)
    else:
        directory, check = read_engine(path, check_weights=False, check_machine=False), None
    try:
        if directory.manifest.model.family != method:
            raise OptionError(
                f"the engine was built with a draft for {directory.manifest.model.family!r}, not for {method!r}",
                at=OPTION,
                fix=f'say "method": "{directory.manifest.model.family}"',
            )
        ids = _ids(first, directory)
        _check_fits(first.program, directory.program, directory)
    except (EngineFormatError, OptionError):
        if check is not None:
            check.cancel()
        raise
    return BuiltInDraft(directory, check, ids, first.program.vocab_size)


def _ids(first: EngineDirectory, draft: EngineDirectory) -> TokenIds | None:
    ours, theirs = first.program.vocab_size, draft.program.vocab_size
    if DRAFT_IDS_NAME not in first.files:
        if ours != theirs:
            raise EngineFormatError(f"the draft has {theirs} tokens and the engine {ours}", at=draft.path, fix=REBUILD)
        return None
    ids = np.frombuffer(first.files.read(DRAFT_IDS_NAME), "<i4")
    if len(ids) != theirs or not len(ids) or ids.min() < 0 or ids.max() >= ours:
        raise EngineFormatError(
            f"it names {len(ids)} tokens up to {ids.max(initial=-1)}, for a draft of {theirs} and an engine of {ours}",
            at=first.path / DRAFT_IDS_NAME,
            fix=REBUILD,
        )
    return ids.astype(np.int32)


def _check_fits(first: Program, draft: Program, directory: EngineDirectory) -> None:
    """Blocks, lengths and hidden states are the same in both."""
    widths = {side.columns for side in first.side_outputs if side.name == HIDDEN}
    gives = [side.name for side in draft.side_outputs]
    ours, theirs = first.limits, draft.limits
    if (
        widths != {draft.hidden_width}
        or HIDDEN not in gives
        or ours.block_size != theirs.block_size
        or ours.max_model_len > theirs.max_model_len
    ):
        raise EngineFormatError(
            f"the draft reads hidden states of {draft.hidden_width} numbers in blocks of {theirs.block_size}, and the "
            f"engine gives {sorted(widths)} in blocks of {ours.block_size}",
            at=directory.path,
            fix=REBUILD,
        )
