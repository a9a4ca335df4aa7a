"""The files that sentence-transformers adds to a model: pooling, further modules, and preparation of texts.

modules.json lists the modules by path and class; both spellings of classes and of 1_Pooling/config.json are read: a
flag for each way of pooling, and since version 5.3 the name of one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import CaptureError, CheckpointError
from llmc.frontends.checkpoints.directory_files import read_json, read_json_if_there, read_json_list
from llmc.program import Head, Pooling, Similarity, Task, TextPreparation, TextPrompt

MODULES = "modules.json"
_SETTINGS = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_FLAGS = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_NAMES = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}
_OTHER_FLAGS = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")


@dataclass(frozen=True)
class DenseModule:
    """A product after the pooling. directory: the directory of its weights. activation: the name of a class of
    torch.nn."""

    directory: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str


@dataclass(frozen=True)
class SentenceModules:
    """The modules of a sentence-transformers directory. head: without its width and whether texts come whole.
    max_length: maximum tokens of a text; None takes the model's own limit."""

    head: Head
    dense: tuple[DenseModule, ...]
    max_length: int | None


def sentence_modules(directory: Path) -> SentenceModules | None:
    """Return the modules of modules.json; None for a directory without it. Raises CheckpointError, and CaptureError for
    an unknown module."""
    file = directory / MODULES
    if not file.is_file():
        return None
    pooling: Pooling | None = None
    dense: list[DenseModule] = []
    normalized = leaves_prompts_out = False
    for entry in read_json_list(file):
        place = _text(entry, "path", file)
        kind = _text(entry, "type", file).rpartition(".")[2]
        if kind == "Pooling":
            config = directory / place / "config.json"
            pooling, leaves_prompts_out = _pooling(config), read_json(config).get("include_prompt") is False
        elif kind == "Dense":
            dense.append(_dense(directory / place))
        elif kind == "Normalize":
            normalized = True
        elif kind not in ("Transformer", "Dropout"):
            raise CaptureError(
                f"the module {kind} of sentence-transformers is not known",
                at=file,
                fix="llmc reads Transformer, Pooling, Dense and Normalize; compile the model without the others",
            )
    if pooling is None:
        raise CaptureError("there is no Pooling among the modules", at=file, fix="give pooling=mean, cls or last")
    settings, prompts = (read_json_if_there(directory / name) for name in (_SETTINGS, _PROMPTS))
    preparation = _preparation(prompts, settings.get("do_lower_case") is True, directory / _PROMPTS)
    if pooling is Pooling.MEAN and leaves_prompts_out and any(prompt.text for prompt in preparation.prompts):
        raise CaptureError(
            "the mean excludes the tokens of a text's prompt (include_prompt is false), which llmc does not support",
            at=directory,
            fix="give pooling=mean to include them, and write prompts into the texts yourself",
        )
    similarity = _similarity(prompts, directory / _PROMPTS)
    head = Head(Task.EMBED, pooling, 0, False, normalized, preparation=preparation, similarity=similarity)
    length = settings.get("max_seq_length")
    return SentenceModules(head, tuple(dense), length if type(length) is int and length > 0 else None)


def _pooling(file: Path) -> Pooling:
    settings = read_json(file)
    named = settings.get("pooling_mode")
    names = named if isinstance(named, list) else [] if named is None else [named]
    modes = [_NAMES.get(name) if isinstance(name, str) else None for name in names]
    modes += [mode for flag, mode in _FLAGS.items() if settings.get(flag)]
    requested = [*names, *(flag for flag in (*_FLAGS, *_OTHER_FLAGS) if settings.get(flag))]
    if len(requested) != 1 or len(modes) != 1 or modes[0] is None:
        raise CaptureError(
            f"texts are pooled by {', '.join(map(str, requested)) or 'nothing'}, expected one of cls, mean, lasttoken",
            at=file,
            fix="choose one with pooling=mean, cls or last, if the model was trained for it",
        )
    return modes[0]


def _dense(directory: Path) -> DenseModule:
    file = directory / "config.json"
    settings = read_json(file)
    width, out = settings.get("in_features"), settings.get("out_features")
    if type(width) is not int or type(out) is not int or min(width, out) < 1:
        raise CheckpointError(f"a Dense module of {width} by {out}", at=file, fix="download the model again")
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    return DenseModule(directory, width, out, settings.get("bias", True) is not False, activation)


def _preparation(settings: Mapping[str, Any], lowercases: bool, file: Path) -> TextPreparation:
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"the prompts are {prompts!r:.60}", at=file, fix="download the model again")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise CheckpointError(
            f"the default prompt is {default!r:.60}, which is not among the prompts: {', '.join(prompts) or 'none'}",
            at=file,
            fix="write the name of one of them there, or null",
        )
    return TextPreparation(tuple(TextPrompt(name, text) for name, text in prompts.items()), default, lowercases)


def _similarity(settings: Mapping[str, Any], file: Path) -> Similarity:
    named = settings.get("similarity_fn_name") or Similarity.COSINE.value
    known = {measure.value: measure for measure in Similarity}
    if not isinstance(named, str) or named not in known:
        raise CaptureError(
            f"vectors are compared by {named!r:.60}, which is not known", at=file, fix=f"use {', '.join(known)}"
        )
    return known[named]


def _text(entry: Mapping[str, Any], key: str, file: Path) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or ".." in Path(value).parts or Path(value).is_absolute():
        raise CheckpointError(f"a module has the {key} {value!r:.60}", at=file, fix="download the model again")
    return value
