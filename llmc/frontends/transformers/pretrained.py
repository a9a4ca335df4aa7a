"""Capture of a transformers model that is in memory."""

from pathlib import Path
from typing import Any

from llmc.errors import CaptureError
from llmc.frontends.captured import Captured
from llmc.frontends.checkpoints.memory_source import parameter_dtype, parameters_of, tied_names
from llmc.frontends.front_end import FrontEnd
from llmc.frontends.heads.chosen_task import task_of_model
from llmc.frontends.heads.head_plan import head_plan
from llmc.frontends.tracing.fake_copy import fake_copy
from llmc.frontends.transformers import experts, hooks
from llmc.frontends.transformers.capture import traced
from llmc.frontends.transformers.config import model_info, resolve_dtype, valid_values
from llmc.frontends.transformers.rotary_lengths import hold_frequencies
from llmc.frontends.transformers.skeleton import text_half
from llmc.frontends.transformers.text_half import left_out, text_config
from llmc.graph.weights import Recipe, Stored
from llmc.options import BuildOptions


def capture_pretrained(model: Any, options: BuildOptions) -> Captured:
    """Capture a transformers causal LM that is in memory, which is left as it was."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise CaptureError(
            f"{type(model).__name__} is an encoder-decoder model",
            fix="llmc compiles decoder language models: ids to logits",
        )
    task = task_of_model(model, options.task)
    text = text_config(model.config, type(model).__name__)
    if text is not None and task is None:
        whole, model = model.config, text_half(model, text)
    dtype = resolve_dtype(options, model.dtype)
    recipes: dict[str, Recipe] = {name: Stored(first, dtype) for name, first in tied_names(model).items()}
    fake = fake_copy(model, dtype, cast_buffers=False)
    # Set on the copy, whose layers all refer to this one config.
    fake.config._attn_implementation = hooks.implementation_for(type(model), both_ways=task is not None)
    experts.use_experts_hook(fake.config)
    with valid_values(model.config.model_type, "model.config"):
        rotary = hold_frequencies(fake, fake.config, options.max_model_len, "model.config")
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    generation = getattr(model, "generation_config", None)
    configs = (model.config,) if text is None else (whole, model.config)
    # Without what their classes have for models that say nothing.
    stated = [settings.to_diff_dict() for settings in (*(() if generation is None else (generation,)), *configs)]
    info, notes = model_info(Path(name).name, model.config, stated, dtype)
    notes = (*(() if text is None else (left_out(whole),)), *notes, *rotary)
    plan = None if task is None else head_plan(task, fake, options)
    graph = traced(fake, recipes, info, plan)
    return Captured(graph, parameters_of(model), notes)


def _is_pretrained(model: object) -> bool:
    """Whether it is a transformers model, without importing transformers for one that is not."""
    if not any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


PRETRAINED = FrontEnd(
    "transformers model",
    recognises=_is_pretrained,
    dtype=lambda opened: parameter_dtype(opened.given),
    weights=lambda opened: parameters_of(opened.given),
    capture=lambda opened, options, may_lack_weights: capture_pretrained(opened.given, options),
    directory=lambda model: None,
)
