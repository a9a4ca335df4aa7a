"""Reading a model directory's config.json and generation_config.json, and finding the transformers class for it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmc.errors import CaptureError, CheckpointError
from llmc.frontends.checkpoints.directory_files import read_json, read_json_if_there
from llmc.frontends.heads.chosen_task import chosen_task, class_name_of
from llmc.frontends.transformers.text_half import text_config
from llmc.graph.dtype_names import NAMED_DTYPES, torch_name
from llmc.graph.model_graph import ModelInfo
from llmc.options import BuildOptions, TaskChoice
from llmc.program import Task

_MOST = {"num_hidden_layers": 4096, "head_dim": 1 << 16}
# Exceptions of transformers and torch for values that do not define a model.
_RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def check_directory(directory: Path) -> None:
    """Raise CheckpointError unless the path is a directory with a config.json."""
    if not directory.exists():
        raise CheckpointError(
            "no such model directory",
            at=directory,
            fix="name a directory that exists, or a model on the hub: org/name",
        )
    if not directory.is_dir():
        raise CheckpointError(
            "the model is a file, not a directory",
            at=directory,
            fix="pass the directory that holds config.json and the safetensors files, or a .gguf or .onnx file",
        )
    if (directory / "config.json").is_file():
        return
    if (directory / "manifest.json").is_file() and (directory / "program.json").is_file():
        raise CheckpointError(
            "this is a built engine, not a model",
            at=directory,
            fix=f"run it: llmc run {directory} --prompt TEXT, or pass the model it was built from",
        )
    raise CheckpointError(
        "not a model directory: it has no config.json",
        at=directory,
        fix="name the directory that holds config.json and the safetensors of a Hugging Face model",
    )


@dataclass(frozen=True)
class LoadedConfig:
    """A model's config as transformers loads it. config: the config of the model that is built, a `model_class`. whole:
    the config of the checkpoint, if that is a multimodal model; `config` is then that of its text half. task: the task
    of its head; None for a model that generates."""

    config: Any
    model_class: Any
    whole: Any | None = None
    task: Task | None = None


def load_config(directory: Path, asked: TaskChoice = "generate") -> LoadedConfig:
    """The transformers config of a directory, and the model class for the task; by default a causal LM.

    Raises CheckpointError for an architecture that transformers does not know or that needs the model's own code,
    CaptureError for one that is not a decoder language model.
    """
    file = directory / "config.json"
    settings = read_json(file)
    transformers = import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = settings.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json names no model_type", at=file, fix="use a transformers checkpoint")
    if settings.get("is_encoder_decoder"):
        raise _not_a_decoder(model_type, "is an encoder-decoder model", file)
    if model_type not in CONFIG_MAPPING:
        if settings.get("auto_map"):
            raise CheckpointError(
                f"architecture {model_type!r} needs Python code from the checkpoint, which llmc does not run",
                at=file,
                fix="load it yourself with trust_remote_code and pass the model object to llmc.compile",
            )
        raise CheckpointError(
            f"unknown architecture {model_type!r} (transformers {transformers.__version__})",
            at=file,
            fix="upgrade transformers, or pass the model as an nn.Module to llmc.compile",
        )
    with valid_values(model_type, file):
        whole = CONFIG_MAPPING[model_type].from_pretrained(directory, local_files_only=True)
        text = text_config(whole, file)
    config = whole if text is None else text
    task = chosen_task(settings, directory, asked)
    if task is not None and text is not None:
        raise CaptureError(f"{model_type!r} is multimodal", at=file, fix="choose a text model for this task")
    class_name = _causal_class(config) if task is None else class_name_of(task, config.model_type, file)
    if class_name is None:
        half = "" if text is None else f"is multimodal, and its text half, {config.model_type!r}, "
        raise _not_a_decoder(model_type, f"{half}has no causal language model in transformers", file)
    # Weights are read as codes by frontends/checkpoints/quantized.py; the model is captured as if they were none.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    check_sizes(config, file)
    return LoadedConfig(config, getattr(transformers, class_name), None if text is None else whole, task)


def _causal_class(config: Any) -> str | None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.model_type in names:
        return names[config.model_type]
    # The text half of Emu 3 is named by the whole model's type, which is that of its module.
    class_name = names.get(type(config).__module__.split(".")[-2])
    return (
        class_name
        if class_name is not None and getattr(transformers, class_name).config_class is type(config)
        else None
    )


def check_sizes(config: Any, at: str | Path) -> None:
    """Raise CheckpointError for implausible sizes, which would take forever to build."""
    # Gemma 4's layers have different head widths, for example.
    by_layer = getattr(getattr(config, "_heterogeneity_spec", None), "per_layer_attributes", ())
    for name, most in _MOST.items():
        for layer_config in config.per_layer_config if name in by_layer else (config,):
            size = getattr(layer_config, name, None)
            if size is not None and (type(size) is not int or not 1 <= size <= most):
                raise CheckpointError(
                    f"{name} is {size!r:.40}, expected 1 to {most}",
                    at=at,
                    fix="correct the value in config.json",
                )


@contextmanager
def valid_values(model_type: str, file: str | Path) -> Iterator[None]:
    """Turn what transformers raises for a value in config.json into a CheckpointError that quotes it."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (*_RAISED, StrictDataclassError) as error:
        raise CheckpointError(
            f"config.json does not make a {model_type} model: {_told(error)}",
            at=file,
            fix="correct the value in config.json",
        ) from error


def _told(error: BaseException) -> str:
    """The message of an error on one line, with the keys of config.json."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "pad_token_id is not in the vocabulary" if "adding_idx must be within" in text else text


def resolve_dtype(options: BuildOptions, stored: torch.dtype, at: Path | None = None) -> torch.dtype:
    """The dtype to build in: the option's, or the model's own where an engine can compute in it."""
    if options.dtype != "auto":
        return NAMED_DTYPES[options.dtype]
    if stored not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"the model is {torch_name(stored)}, which engines do not compute in unasked",
            at=at,
            fix="choose dtype=float32 (keeps every bit), dtype=bfloat16 (half the memory), or dtype=float16 for a GPU",
        )
    return stored


def model_info(
    name: str, config: Any, sources: Sequence[Mapping[str, Any]], dtype: torch.dtype
) -> tuple[ModelInfo, tuple[str, ...]]:
    """Facts that the engine needs in addition to the graph, and notes for a build to print.

    Args:
        name: The model's name.
        config: Its sizes, and the default token ids of its class, used if no file states any.
        sources: The settings that state token ids: generation_config.json, then config.json. Every end token that any
            of them names ends a text; the first one's begin token begins it.
        dtype: The engine's dtype.

    Raises:
        CheckpointError: A value that must be a whole number is not one.
    """
    vocab_size = _whole_number("vocab_size", config.vocab_size)
    notes: list[str] = []

    def token_ids(key: str) -> tuple[int, ...]:
        ids: list[int] = []
        for value in [settings[key] for settings in sources if settings.get(key) is not None] or [
            getattr(config, key, None)
        ]:
            for token_id in value if isinstance(value, list | tuple) else () if value is None else (value,):
                if 0 <= _whole_number(key, token_id) < vocab_size:
                    ids.append(token_id)
                else:
                    notes.append(
                        f"{key} {token_id} is not among the {vocab_size} tokens of the vocabulary: it is ignored"
                    )
        return tuple(dict.fromkeys(ids))

    limits = (getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    limit = next((limit for limit in limits if limit is not None), None)
    if limit is not None and _whole_number("max_position_embeddings", limit) < 1:
        raise CheckpointError(
            f"max_position_embeddings is {limit}", at="config.json", fix="correct it: the longest sequence, in tokens"
        )
    info = ModelInfo(
        name=name,
        family=config.model_type,
        vocab_size=vocab_size,
        max_positions=limit,
        dtype=dtype,
        bos_token_id=next(iter(token_ids("bos_token_id")), None),
        eos_token_ids=token_ids("eos_token_id"),
    )
    return info, tuple(dict.fromkeys(notes))


def _whole_number(key: str, value: Any) -> int:
    if type(value) is not int:
        raise CheckpointError(
            f"{key} is {value!r:.60}, not a whole number",
            at="config.json or generation_config.json",
            fix="correct the value, or remove it where the model has none",
        )
    return value


def stated_tokens(directory: Path) -> tuple[dict[str, Any], ...]:
    """The statements about token ids in a directory's files: generation_config.json, and config.json, or its text half
    where the whole does not state them. Classes of transformers have their own ids for models that state none."""
    config = read_json_if_there(directory / "config.json")
    text = config.get("text_config")
    stated = {key: value for key, value in config.items() if value is not None}
    return (
        read_json_if_there(directory / "generation_config.json"),
        {**(text if isinstance(text, dict) else {}), **stated},
    )


def import_transformers() -> Any:
    """The transformers package; raises CaptureError that says how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise CaptureError(
            f"reading a model directory needs transformers: {error}", fix='pip install "llmc-compiler[hf]"'
        ) from error
    return transformers


def _not_a_decoder(model_type: str, what: str, file: Path) -> CaptureError:
    return CaptureError(f"{model_type!r} {what}", at=file, fix="llmc compiles decoder language models: ids to logits")
