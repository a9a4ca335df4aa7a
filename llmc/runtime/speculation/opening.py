"""Open the drafter of --speculative-config for an engine: checked before the engine is opened, started afterwards."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmc.engine_format import EngineDirectory
from llmc.engine_format.engine_kinds import ExecutorName
from llmc.errors import LoadWarning, OptionError
from llmc.prediction.step_prior import step_prior
from llmc.program import Limits, Program
from llmc.program.step_outputs import DRAFT_IDS
from llmc.runtime.executors.opening import open_second
from llmc.runtime.ranks.launch import refuse_launched
from llmc.runtime.speculation.acceptance import Acceptance, Rejection, Typical
from llmc.runtime.speculation.acceptance_config import AcceptanceConfig, AcceptanceMethod
from llmc.runtime.speculation.built_in_draft import BuiltInDraft, start_built_in
from llmc.runtime.speculation.config import (
    DraftModelConfig,
    Eagle3Config,
    HiddenConfig,
    MedusaConfig,
    SpeculativeConfig,
    new_drafter,
)
from llmc.runtime.speculation.config_values import OPTION
from llmc.runtime.speculation.draft_model import DraftModel
from llmc.runtime.speculation.drafter import Drafter
from llmc.runtime.speculation.gate import Gate
from llmc.runtime.speculation.hidden_drafter import HiddenDrafter
from llmc.runtime.speculation.second_engine import SecondEngine, start_second
from llmc.runtime.speculation.speculation import Speculation


@dataclass(frozen=True)
class SpeculationPlan:
    """The engines of speculation, before they are opened. first: the target's engine. second: the drafter, with a cache
    of the same number of blocks."""

    config: SpeculativeConfig
    first: EngineDirectory
    second: SecondEngine | BuiltInDraft | None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the drafting engines."""
        return () if self.second is None else self.second.programs

    def start(self, blocks: int, threads: int, name: ExecutorName | None) -> Speculation:
        """Start the drafter for an engine whose cache has `blocks` blocks. name: the engine's executor, if one was
        requested."""
        new_drafter = self._new_drafter(blocks, threads, name)
        most, acceptance = self.config.num_speculative_tokens, new_acceptance(self.config.acceptance)
        return Speculation(new_drafter, most, self._new_gate, acceptance)

    def _new_gate(self, most: int) -> Gate:
        target = self.first.manifest.target.name
        prior, *of_drafts = (step_prior(program, target) for program in (self.first.whole_program, *self.programs[:1]))
        return Gate(most, prior, *of_drafts)

    def _new_drafter(self, blocks: int, threads: int, name: ExecutorName | None) -> Callable[[], Drafter]:
        needs_origins = self.config.acceptance.method is AcceptanceMethod.REJECTION
        if isinstance(self.config, DraftModelConfig):
            assert isinstance(self.second, SecondEngine), "a draft model is an engine"
            executor = open_second(self.second.directory, blocks, threads, name, self.second.check)
            return partial(DraftModel, executor, self.programs[0].limits, says_from_what=needs_origins)
        if isinstance(self.config, HiddenConfig):
            assert isinstance(self.second, BuiltInDraft), "it is a part of the engine"
            layers = self.second.open(blocks, threads, name)
            limits, width = self.programs[0].limits, self.config.tree_width
            return partial(HiddenDrafter, layers, limits, width=width, says_from_what=needs_origins)
        return partial(new_drafter, self.config)


def new_acceptance(config: AcceptanceConfig) -> Acceptance | None:
    """The acceptance method; None if drafts need no judgement."""
    if config.method is AcceptanceMethod.REJECTION:
        return Rejection()
    if config.method is AcceptanceMethod.TYPICAL:
        return Typical(config.posterior_threshold, config.posterior_alpha)
    return None


def plan_speculation(
    config: SpeculativeConfig,
    first: EngineDirectory,
    limits: Limits,
    max_step_tokens: int | None,
    *,
    check_weights: bool,
) -> SpeculationPlan:
    """Plan the drafter for the engine that is about to be opened. limits: the engine's, or lower ones that were
    requested.

    Warns if many requests get fewer drafts than the maximum. Raises OptionError for settings that do not fit the
    engine, EngineFormatError if the draft model is not a complete engine, RankError if torchrun has not started its
    ranks.
    """
    tokens = min(max_step_tokens or limits.max_batch_tokens, limits.max_batch_tokens)
    _check_room(config.num_speculative_tokens, tokens, limits)
    _warn_of_few_rows(config.num_speculative_tokens, tokens, limits)
    _check_states(first.program, first.path)
    if isinstance(config, DraftModelConfig):
        second = start_second(Path(config.model), first, check_weights=check_weights)
        _check_ranks(second.programs[0], "build the draft model for one rank: --tensor-parallel-size 1")
        _check_states(second.programs[0], Path(config.model))
        return SpeculationPlan(config, first, second)
    if isinstance(config, HiddenConfig):
        method = "eagle3" if isinstance(config, Eagle3Config) else "mtp"
        draft = start_built_in(first, method, check_weights=check_weights)
        _check_ranks(draft.programs[0], "draft with ngram, suffix or lookahead, or with an engine of one rank")
        return SpeculationPlan(config, first, draft)
    if isinstance(config, MedusaConfig):
        _check_heads(first)
    return SpeculationPlan(config, first, None)


def _check_ranks(second: Program, instead: str) -> None:
    """Check the drafter's ranks: those that torchrun has started belong to the target's engine."""
    if second.layout.ranks > 1:
        refuse_launched("the engine that drafts", at=OPTION, fix=f"{instead}; or start one process, without torchrun")


def _check_states(program: Program, path: Path) -> None:
    if program.states:
        raise OptionError(
            f"the model keeps {len(program.states)} states of a sequence, which cannot be rolled back after a draft",
            at=path,
            fix="load it without speculation, or draft with a model that has none",
        )


def _check_heads(engine: EngineDirectory) -> None:
    if all(side.name != DRAFT_IDS for side in engine.program.side_outputs):
        raise OptionError(
            f"the engine {engine.path.name} has no draft heads",
            at=OPTION,
            fix="train some (llmc train-medusa ENGINE --text FILE -o heads.safetensors) and build them in: "
            "llmc build MODEL --speculative heads.safetensors -o ENGINE",
        )


def _check_room(most: int, tokens: int, limits: Limits) -> None:
    room = min(tokens, limits.max_logit_rows) - 1
    if most > room:
        larger = "rebuild the engine with larger max_batch_tokens and max_logit_rows"
        raise OptionError(
            f"num_speculative_tokens is {most}, and a step has room for {room} in addition to the token before them",
            at=OPTION,
            fix=f"give {room} at most, or {larger}" if room else larger,
        )


def _warn_of_few_rows(most: int, tokens: int, limits: Limits) -> None:
    rows, wanted = limits.max_logit_rows, min(limits.max_sequences * (1 + most), tokens)
    if rows < wanted:
        warnings.warn(
            f"the engine has {rows} rows of logits per step; {limits.max_sequences} requests with {most} drafts each "
            f"need {wanted}: if there are more than {rows // (1 + most)}, each gets fewer drafts; to change "
            f"that, rebuild it with --max-logit-rows {wanted}",
            LoadWarning,
            stacklevel=4,
        )
