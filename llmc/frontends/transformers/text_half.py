"""The text half of a multimodal checkpoint: its config, and its weights under the names of the text model.

A config with a text_config (Gemma 3, Mistral 3, Llava) is built as the model that transformers' causal mapping makes of
that: its decoder reads only tokens. Everything else in the checkpoint (towers, projectors) is left out, and a line
says so.
"""

import re
from collections.abc import Iterable
from typing import Any

from llmc.errors import CaptureError

# As checkpoints write it before and after transformers 4.52: language_model.model.layers, model.language_model.layers.
_TEXT_PART = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?=[^.]+\.)")
_TEXT_HEAD = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?=lm_head\.)")
# Their decoders see all of a prompt at once, which no causal model is.
_NOT_CAUSAL = frozenset({"paligemma"})


def text_config(config: Any, at: object) -> Any | None:
    """The config of the text half; None if the model has no other. Raises CaptureError for one that is not causal."""
    text = config.get_text_config(decoder=True)
    if text is config:
        return None
    if config.model_type in _NOT_CAUSAL:
        raise CaptureError(
            f"the text half of {config.model_type!r} attends to a whole prompt at once",
            at=str(at),
            fix="llmc compiles causal decoders, in which a token sees those before it",
        )
    return text


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Map the text model's names to stored names; names of other parts are left out."""
    ours: dict[str, str] = {}
    for name in names:
        if _TEXT_HEAD.match(name):
            ours[_TEXT_HEAD.sub("", name)] = name
        elif _TEXT_PART.match(name):
            ours[_TEXT_PART.sub("model.", name)] = name
        elif name.startswith(("lm_head.", "model.layers.", "model.embed_tokens.", "model.norm.")):
            ours[name] = name
    return ours


def left_out(config: Any) -> str:
    """The line that a build says."""
    parts = [key.removesuffix("_config") for key in ("vision_config", "audio_config") if hasattr(config, key)]
    inputs = {"vision": "images", "audio": "sound"}
    missing = " and ".join(inputs[part] for part in parts) or "everything but text"
    return (
        f"{config.model_type} is multimodal: its text half is built, {missing} {'is' if not parts else 'are'} left out"
    )
