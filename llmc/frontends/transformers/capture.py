"""Capture of a model directory that transformers describes, without its weights."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from llmc.files.hub_model import model_name
from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.checkpoint_source import CheckpointSource
from llmc.frontends.checkpoints.config_source import ConfigSource, config_dtype
from llmc.frontends.checkpoints.directory_files import read_json
from llmc.frontends.drafts.mtp import mtp_tensors
from llmc.frontends.front_end import OpenedModel
from llmc.frontends.heads.dense_source import dense_recipes, with_dense
from llmc.frontends.heads.head_plan import HeadPlan, head_plan
from llmc.frontends.heads.row_module import RowModule, numbers_ids
from llmc.frontends.tracing.fake_copy import make_parameters_fake
from llmc.frontends.tracing.program_graph import graph_from_program
from llmc.frontends.tracing.trace import explained_at_once, trace
from llmc.frontends.transformers.capture_cache import capture_entry, find_capture, keep_capture
from llmc.frontends.transformers.config import (
    check_directory,
    load_config,
    model_info,
    resolve_dtype,
    stated_tokens,
    valid_values,
)
from llmc.frontends.transformers.names import StoredNames, stored_recipes
from llmc.frontends.transformers.rotary_lengths import hold_frequencies
from llmc.frontends.transformers.scans import scans_as_ops
from llmc.frontends.transformers.skeleton import skeleton, whole_skeleton
from llmc.frontends.transformers.text_half import left_out, text_names
from llmc.frontends.transformers.tied_copies import Copies, compared, refuse_different
from llmc.graph.model_graph import ModelGraph, ModelInfo
from llmc.graph.weights import Recipe, Stored
from llmc.options import OWN_LAYERS, BuildOptions

_TIED, _OUTPUT, _EMBEDDINGS = "tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight"


def capture_directory(
    model: OpenedModel[CheckpointSource], options: BuildOptions, *, lacks_weights: bool = False
) -> Captured:
    """Capture a directory with config.json; reads headers, never weight data.

    lacks_weights: config.json is enough (config_source.py). A graph that was captured from the same before is read
    from the cache (capture_cache.py).
    """
    directory: Path = model.given
    check_directory(directory)
    entry = capture_entry(model, options, has_weights=not lacks_weights)
    kept = None if entry is None else find_capture(entry)
    if kept is not None and (lacks_weights or kept.is_of(model.weights)):
        graph, notes = kept.graph, kept.notes
        graph.info = replace(graph.info, name=model_name(directory))
    else:
        read = read_config(directory, options) if lacks_weights else read_directory(model, options)
        graph, notes = traced(read.model, read.recipes, read.info, read.plan), read.notes
        if entry is not None:
            keep_capture(entry, graph, notes, read.copies)
    if lacks_weights:
        return Captured(graph, ConfigSource(directory, graph), notes)
    return Captured(graph, with_dense(model.weights, graph, directory), notes)


@dataclass(frozen=True)
class ReadModel:
    """A model without its weights. recipes: the recipes of its tensors, by the model's names. notes: for a build to
    print. plan: the plan of its head; None for a model that generates. copies: tensors that the checkpoint holds
    twice."""

    model: Any
    recipes: dict[str, Recipe]
    info: ModelInfo
    notes: tuple[str, ...] = ()
    plan: HeadPlan | None = None
    copies: tuple[Copies, ...] = ()


def read_config(directory: Path, options: BuildOptions) -> ReadModel:
    """Make a model from only its config.json. Raises CheckpointError, CaptureError."""
    file = directory / "config.json"
    loaded = load_config(directory, options.task)
    with valid_values(loaded.config.model_type, file):
        dtype = resolve_dtype(options, config_dtype(loaded.config), directory)
        model = skeleton(loaded.model_class, loaded.config, dtype, task=loaded.task)
        notes = hold_frequencies(model, loaded.config, options.max_model_len, file)
        first: dict[int, str] = {}
        tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        recipes: dict[str, Recipe] = {
            name: Stored(first.setdefault(id(tensor), name), tensor.dtype) for name, tensor in tensors.items()
        }
        make_parameters_fake(model)
        info, _ = model_info(model_name(directory), loaded.config, stated_tokens(directory), dtype)
    plan = None if loaded.task is None else head_plan(loaded.task, model, options, directory)
    return ReadModel(model, recipes, info, notes, plan=plan)


def read_directory(opened: OpenedModel[CheckpointSource], options: BuildOptions) -> ReadModel:
    """Read config.json and the weights' headers, and make the model of them. Raises CheckpointError, CaptureError."""
    directory: Path = opened.given
    file = directory / "config.json"
    loaded = load_config(directory, options.task)
    config, whole = loaded.config, loaded.whole
    source = opened.weights
    dtype = resolve_dtype(options, getattr(config, "dtype", None) or source.dtype(), directory)
    notes = _tie_if_unsaid(config, whole, source) if loaded.task is None else ()
    drafting = mtp_tensors(source) if options.speculative == OWN_LAYERS else frozenset()
    outer = None if whole is None else partial(whole_skeleton, whole, dtype, file)

    def read() -> tuple[Any, StoredNames]:
        with valid_values(config.model_type, file):
            made = skeleton(loaded.model_class, config, dtype, task=loaded.task)
        return made, stored_recipes(made, source, whole=outer, read_elsewhere=drafting)

    model, stored = read()
    copies = compared(stored.copies, source)
    different = [copy for copy in copies if not copy.are_equal]
    if different and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
        model, stored = read()
        refuse_different(compared(stored.copies, source), source)
        named = f"{different[0].second} to {different[0].first}"
        notes += (f"config.json ties {named}, and they differ in the checkpoint: they are not tied",)
    elif different:
        refuse_different(different, source)
    with valid_values(config.model_type, file):
        rotary = hold_frequencies(model, config, options.max_model_len, file)
        make_parameters_fake(model)
        info, ids = model_info(model_name(directory), config, stated_tokens(directory), dtype)
    notes = (*(() if whole is None else (left_out(whole),)), *source.notes, *notes, *stored.notes, *ids, *rotary)
    plan = None if loaded.task is None else head_plan(loaded.task, model, options, directory)
    return ReadModel(model, stored.recipes, info, notes, plan, copies)


def _tie_if_unsaid(config: Any, whole: Any | None, source: CheckpointSource) -> tuple[str, ...]:
    """Tie the output matrix where the checkpoint has none and the config does not object; notes on what was decided."""
    names = text_names(source.names())
    if _OUTPUT in names:
        return ()
    if getattr(whole, "tie_word_embeddings", False):
        config.tie_word_embeddings = True  # The outer config decides, and files without a head agree.
    settings = read_json(source.directory / "config.json")
    text = settings.get("text_config")
    is_said = _TIED in settings or (isinstance(text, dict) and _TIED in text)
    if is_said or getattr(config, _TIED, True) or _EMBEDDINGS not in names:
        return ()
    config.tie_word_embeddings = True
    return (f"the checkpoint has no {_OUTPUT}, and config.json no {_TIED}: the embeddings are the output matrix",)


class LogitsOnly(nn.Module):
    """A transformers causal LM as forward(input_ids, positions) -> logits of all tokens, without a cache.

    Models that number tokens from the ids (RoBERTa's begin after the padding's) take no positions.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._numbers_ids = numbers_ids(model)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the model. input_ids, positions: [1, T]. Returns [1, T, vocab]."""
        with explained_at_once():
            keywords = {} if self._numbers_ids else {"position_ids": positions}
            logits: Tensor = self.model(input_ids=input_ids, use_cache=False, **keywords).logits
        return logits


def traced(model: Any, recipes: dict[str, Recipe], info: ModelInfo, plan: HeadPlan | None = None) -> ModelGraph:
    # A few models read this only from the config.
    model.config.use_cache = False
    with scans_as_ops(model):
        if plan is None:
            program = trace(LogitsOnly(model), with_positions=True)
            return graph_from_program(program, recipes, info, prefix="model.")
        program = trace(RowModule(model, plan), with_positions=True)
    longest = info.max_positions
    if longest is not None and numbers_ids(model):
        longest -= 1 + (model.config.pad_token_id or 0)
    limits = [length for length in (longest, plan.max_length) if length is not None]
    info = replace(info, head=plan.head, max_positions=min(limits, default=None))
    return graph_from_program(program, recipes | dense_recipes(plan.dense, info.dtype), info, prefix="model.")
