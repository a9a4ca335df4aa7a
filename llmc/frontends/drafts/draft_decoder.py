"""The decoder layers of a draft, as transformers makes them from a config, without weights."""

from pathlib import Path
from typing import Any

from llmc.errors import CheckpointError
from llmc.frontends.transformers.config import check_sizes, import_transformers, valid_values
from llmc.frontends.transformers.rotary_lengths import hold_frequencies
from llmc.frontends.transformers.skeleton import skeleton
from llmc.graph.draft_records import Target


def draft_decoder(settings: dict[str, Any], file: Path, target: Target) -> Any:
    """Return the transformers decoder that the settings of a config.json describe, without its embeddings.

    Raises CheckpointError for an unknown architecture and for invalid values.
    """
    transformers = import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = settings["model_type"]
    if model_type not in CONFIG_MAPPING or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CheckpointError(
            f"the draft's layers are of the architecture {model_type!r:.60}, which is not a causal language model of "
            f"transformers {transformers.__version__}",
            at=file,
            fix="upgrade transformers, or choose another draft",
        )
    with valid_values(model_type, file):
        config = CONFIG_MAPPING[model_type].from_dict(settings)
    return decoder_of(config, getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]), file, target)


def decoder_of(config: Any, model_class: Any, file: Path, target: Target) -> Any:
    """Return the decoder of a transformers config, without its embeddings; the config is changed in place."""
    with valid_values(config.model_type, file):
        check_sizes(config, file)
        # The embeddings are not part of the decoder, so the size of its vocabulary does not matter.
        config.pad_token_id = None
        decoder = skeleton(model_class, config, target.dtype).base_model
        hold_frequencies(decoder, config, target.longest, file)
    decoder.embed_tokens = None
    return decoder
