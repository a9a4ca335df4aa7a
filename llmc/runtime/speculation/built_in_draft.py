"""The drafting engine inside an engine, which reads its hidden states; and inside that one, the engine of its next
layer."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from llmc.engine_format import EngineDirectory
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.engine_format.reader import DRAFT, DRAFT_IDS_NAME, engine_to_run
from llmc.errors import EngineFormatError, OptionError
from llmc.files.typed_json import REBUILD
from llmc.program import HIDDEN, Program
from llmc.runtime.executors.executor import Executor
from llmc.runtime.executors.opening import open_second
from llmc.runtime.speculation.config_values import OPTION
from llmc.runtime.speculation.draft_vocabulary import TokenIds, in_vocabulary
from llmc.runtime.speculation.second_engine import SecondEngine


@dataclass(frozen=True)
class BuiltInDraft:
    """The draft layers in an engine. layers: engines, each of which drafts from the hidden states of the one before,
    the first from the outer engine's. ids: the outer engine's token for each token of the layers; None if the
    vocabularies are equal. vocab_size: the size of the outer engine's vocabulary."""

    layers: tuple[SecondEngine, ...]
    ids: TokenIds | None
    vocab_size: int

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs, which determine the memory of the caches. The first one's limits apply to all."""
        return tuple(layer.directory.program for layer in self.layers)

    def open(self, blocks: int, threads: int, name: ExecutorName | None) -> list[Executor]:
        """Open the executors, in the outer engine's vocabulary. Raises TargetError."""
        opened = [open_second(layer.directory, blocks, threads, name, layer.check) for layer in self.layers]
        rows = self.programs[0].limits.max_logit_rows
        return [in_vocabulary(executor, self.ids, self.vocab_size, rows) for executor in opened]

    def close(self) -> None:
        """Release the engines without opening them."""
        for layer in self.layers:
            layer.close()


def start_built_in(first: EngineDirectory, method: str, *, check_weights: bool) -> BuiltInDraft:
    """The engine's draft for a method. Raises OptionError if it has none, and EngineFormatError if it does not fit."""
    layers: list[SecondEngine] = []
    outer = first
    while f"{DRAFT}/manifest.json" in outer.files:
        layers.append(SecondEngine(*engine_to_run(outer.path / DRAFT, check_weights=check_weights)))
        outer = layers[-1].directory
    if not layers:
        raise OptionError(
            f"the engine was built without draft layers for the method {method!r}",
            at=OPTION,
            fix="build it with one: llmc build MODEL --speculative DIRECTORY, or mtp",
        )
    draft = BuiltInDraft(tuple(layers), None, first.program.vocab_size)
    try:
        family = layers[0].directory.manifest.model.family
        if family != method:
            raise OptionError(
                f"the engine was built with a draft for {family!r}, not for {method!r}",
                at=OPTION,
                fix=f'set "method": "{family}"',
            )
        for outer, layer in pairwise([first, *(draft_layer.directory for draft_layer in layers)]):
            _check_fits(outer.program, layer.program, layer)
        return replace(draft, ids=_ids(first, layers[0].directory))
    except (EngineFormatError, OptionError):
        draft.close()
        raise


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
    """Check that blocks, lengths and hidden states are equal in both."""
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
