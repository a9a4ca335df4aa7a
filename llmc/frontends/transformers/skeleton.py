"""A transformers model without weights, and the text half of a multimodal one that is in memory."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmc.errors import CaptureError, CheckpointError
from llmc.frontends.transformers import experts as hf_experts
from llmc.frontends.transformers import hooks as hf_hooks
from llmc.frontends.transformers.config import check_sizes, valid_values
from llmc.frontends.transformers.text_half import text_names
from llmc.program import Task


def skeleton(model_class: Any, config: Any, dtype: torch.dtype, *, task: Task | None = None) -> Any:
    """An instance with its parameters on the meta device, and its buffers computed, as from_pretrained does it.

    task: the task of a model that gives a row for a text, which need not be causal; None for a model that generates.
    """
    # By which some choose classes when they are made (GIT); none has one for llmc's hooks.
    config._attn_implementation = "eager"
    hf_experts.use_experts_hook(config)
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype)
    model.config._attn_implementation = hf_hooks.implementation_for(model_class, both_ways=task is not None)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    if task is Task.EMBED and hasattr(model, "pooler"):
        model.pooler = None  # A product after the first token, which embeddings do not go through.
    return model.eval()


def whole_skeleton(config: Any, dtype: torch.dtype, at: Path) -> Any | None:
    """The multimodal model that a checkpoint says it is of, for the names and shapes of its tensors; None for one that
    cannot be made here, because its class is unknown or a part needs another package. at: its config.json.

    Raises CheckpointError for values that make no model."""
    import transformers

    model_class = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if model_class is None:
        return None
    for part in config.sub_configs:
        check_sizes(getattr(config, part), at)
    try:
        with valid_values(config.model_type, at), torch.device("meta"):
            return model_class._from_config(copy.deepcopy(config), dtype=dtype)
    except ImportError:
        return None


def text_half(model: Any, config: Any) -> Any:
    """The causal model of a multimodal model's text half, which refers to its tensors. config: the config of that half.

    Raises CaptureError if the half is not a causal model, CheckpointError for tensors that the model lacks, or has in
    other shapes.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    at = type(model).__name__
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if class_name is None:
        raise CaptureError(
            f"{at} is multimodal, and its text half, {config.model_type!r}, has no causal language model in "
            "transformers",
            fix="llmc compiles decoder language models: ids to logits",
        )
    config = copy.deepcopy(config)
    head = model.get_output_embeddings()
    config.tie_word_embeddings = head is None or head.weight is model.get_input_embeddings().weight
    half = skeleton(getattr(transformers, class_name), config, model.dtype)
    stored: dict[str, Tensor] = model.state_dict()
    try:
        tensors = {name: stored[whole] for name, whole in text_names(stored).items()}
        half.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"the text half of {at} is not as its config says: {error}", fix="correct model.config.text_config"
        ) from None
    half.tie_weights()
    missing = [name for name, tensor in half.named_parameters() if tensor.is_meta]
    if missing:
        raise CheckpointError(
            f"{at} lacks {len(missing)} of its text half's tensors, {missing[0]} for one",
            fix='model.save_pretrained("DIRECTORY"), then compile "DIRECTORY"',
        )
    half.config._name_or_path = getattr(model.config, "_name_or_path", "")
    half.generation_config = model.generation_config
    return half
