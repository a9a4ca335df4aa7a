"""Which task a model directory is built for: the requested one, or that of the class that its config names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.errors import CaptureError
from llmc.frontends.heads.sentence_modules import MODULES
from llmc.options import TaskChoice
from llmc.program import Task

_CLASSIFIER = "ForSequenceClassification"
_MASKED = "ForMaskedLM"


def chosen_task(settings: Mapping[str, Any], directory: Path, asked: TaskChoice) -> Task | None:
    """Return the task of a model, None if it generates. settings: config.json.

    Unasked, a directory of sentence-transformers embeds; else the first of `architectures` decides: a classifier scores
    if it has one label, a bare or masked model embeds, and everything else generates.
    """
    if asked != "auto":
        return None if asked == "generate" else Task(asked)
    if (directory / MODULES).is_file():
        return Task.EMBED
    named = settings.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    if first.endswith(_CLASSIFIER):
        return Task.SCORE if label_count(settings) == 1 else Task.CLASSIFY
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    is_bare = first == MODEL_MAPPING_NAMES.get(str(settings.get("model_type")))
    return Task.EMBED if is_bare or first.endswith(_MASKED) else None


def task_of_model(model: Any, asked: TaskChoice) -> Task | None:
    """Return the task of a transformers model in memory, None if it generates; see `chosen_task`."""
    if asked != "auto":
        return None if asked == "generate" else Task(asked)
    if type(model).__name__.endswith(_CLASSIFIER):
        return Task.SCORE if model.config.num_labels == 1 else Task.CLASSIFY
    # Llama 4's class for text is its own base model, and has an output matrix.
    is_bare = model.base_model is model and model.get_output_embeddings() is None
    return Task.EMBED if is_bare else None


def label_count(settings: Mapping[str, Any]) -> int:
    """Number of labels of a classifier, as in transformers."""
    labels = settings.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(settings.get("num_labels") or 2)


def class_name_of(task: Task, model_type: str, file: Path) -> str:
    """The transformers class for a task. Raises CaptureError if there is none."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    names = MODEL_MAPPING_NAMES if task is Task.EMBED else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    name = names.get(model_type)
    if not isinstance(name, str):
        noun = "model" if task is Task.EMBED else "classifier of texts"
        raise CaptureError(
            f"{model_type!r} has no {noun} in transformers", at=file, fix="build it with another task, such as generate"
        )
    return name
