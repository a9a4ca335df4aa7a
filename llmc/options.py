"""Build options: frozen, validated, and closed; an unknown name or a value out of range is an OptionError."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from llmc.errors import OptionError, did_you_mean
from llmc.formats.cache_format import parse_cache_formats
from llmc.formats.pruning import Pruning, parse_pruning
from llmc.formats.scheme_text import parse_quantization
from llmc.formats.schemes import Quantization
from llmc.formats.sparsity import Sparsity, parse_sparsity

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# Aliases of dtypes, here and on the command line.
DtypeSpelling = Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16", "float", "half", "f32", "f16"]
# A value of `speculative` in place of a directory: MTP layers in the model's own directory.
OWN_LAYERS = "mtp"
_EXAMPLES = {
    "quantize": "int8",
    "sparsity": "magnitude:0.5",
    "prune": "channels=0.125",
}
# Exceptions that reject a value.
_PARSERS: Mapping[str, Callable[[Any], object]] = {
    "quantize": parse_quantization,
    "sparsity": parse_sparsity,
    "prune": parse_pruning,
    "kv_cache": lambda value: value == "auto" or parse_cache_formats(value),
}
_SPELLINGS = {
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
}
# The result of an engine: tokens, or one row per text (docs/embeddings.md). auto follows the model's config.
TaskChoice = Literal["auto", "generate", "embed", "score", "classify"]
PoolingChoice = Literal["auto", "last", "cls", "mean"]
# Contracts of the pipeline that a user may waive by name. Attention, norms and the layout are not among them.
Contract = Literal["rope", "linear", "pointwise", "paged_attention", "states", "logit_rows", "quantized"]


class BuildOptions(BaseModel):
    """How to build an engine.

    Attributes:
        task: generate, or one row per text: embed, score or classify (docs/embeddings.md); auto follows config.json.
        pooling: Pooling of an embedding: last, cls or mean. auto follows modules.json; without it, last for a causal
            model and mean for others.
        dtype: Type of weights and activations; auto keeps the checkpoint's. float16 is for GPUs: for a CPU, a float16
            checkpoint is built as bfloat16. bf16, fp16, half, fp32, float and torch's own dtypes are also accepted.
        kv_dtype: Type of the KV cache; auto is dtype.
        kv_cache: int8, int4 or fp8 codes for the KV cache, or int8/int4 for keys/values, :recent=N for exact newest
            rows (llmc/formats/cache_format.py).
        kv_compression: The policy that drops rows of the KV cache, as NAME:OPTION=VALUE,… (docs/kv-compression.md);
            none keeps all rows.
        quantize: Schemes of weights and activations (formats/schemes.py): one for all, then PATTERN=SCHEME for some. A
            text is split at commas.
        sparsity: Which elements of weights become zero (formats/sparsity.py), in the same form.
        prune: Share or number of inner channels, heads and layers to remove (formats/pruning.py), then PATTERN=SHARE or
            =none for some.
        calibration: Path of a UTF-8 text, or of token ids in a .json or .npy file, for methods that need data.
        calibration_sequences: Number of sequences that are read from its beginning.
        calibration_length: Tokens per calibration sequence, including special tokens before a text.
        max_model_len: Maximum sequence in tokens, prompt and output together; None is the model's own limit.
        max_batch_tokens: Maximum tokens per step.
        max_sequences: Maximum requests per step.
        max_logit_rows: Maximum rows of logits per step. None is one per sequence, or nine with `speculative` or on a
            CPU (for eight drafts), but at least 64 and at most max_batch_tokens.
        block_size: Positions in a KV block.
        speculative: The drafter to build into the engine: a .safetensors file of Medusa heads or its directory, the
            directory of an EAGLE-3 or MTP checkpoint, or "mtp" for MTP layers in the model's own directory.
        lora: PEFT directories of adapters to merge into the weights, as NAME=DIRECTORY, or by their names
            (docs/adapters.md).
        enable_lora: Adapters can be loaded while the engine runs.
        max_loras: Maximum number of adapters in use at once.
        max_lora_rank: Maximum rank of an adapter.
        lora_targets: The modules that adapters may change, by the last part of their names; all linear ones if empty.
        tensor_parallel_size: Number of ranks that share the weights (docs/parallel.md).
        enable_expert_parallel: Each of these ranks has some of the experts, instead of some channels of each
            (docs/experts.md).
        pipeline_parallel_size: Number of stages of layers, each on its own tensor_parallel_size ranks.
        disable_passes: Names from `llmc passes`.
        stop_after: Cut the pipeline after this rewrite number.
        finish_cut: After a cut, still run the passes that every engine needs.
        allow_fallback: Contracts to waive instead of failing the build; such an engine runs, but slower.
        check_passes: Run the graph before and after each pass on real inputs, and compare with the pass's numerics
            class.
        strict: Fail if `llmc explain` would report missing coverage.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    task: TaskChoice = "auto"
    pooling: PoolingChoice = "auto"
    dtype: Dtype = "auto"
    kv_dtype: Dtype = "auto"
    kv_cache: str = "auto"
    kv_compression: str = "none"
    quantize: tuple[str, ...] = ()
    sparsity: tuple[str, ...] = ()
    prune: tuple[str, ...] = ()
    calibration: str | None = None
    calibration_sequences: int = Field(default=32, ge=1, le=65536)
    calibration_length: int = Field(default=256, ge=16, le=65536)
    max_model_len: int | None = Field(default=None, ge=1)
    max_batch_tokens: int = Field(default=512, ge=1, le=65536)
    max_sequences: int = Field(default=64, ge=1, le=4096)
    max_logit_rows: int | None = Field(default=None, ge=1, le=65536)
    block_size: Literal[8, 16, 32, 64, 128] = 16
    speculative: str | None = None
    lora: tuple[str, ...] = ()
    enable_lora: bool = False
    max_loras: int = Field(default=8, ge=1, le=1024)
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    lora_targets: tuple[str, ...] = ()
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    enable_expert_parallel: bool = False
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    disable_passes: tuple[str, ...] = ()
    stop_after: int | None = Field(default=None, ge=0)
    finish_cut: bool = False
    allow_fallback: tuple[Contract, ...] = ()
    check_passes: bool = False
    strict: bool = False

    @field_validator("dtype", "kv_dtype", mode="before")
    @classmethod
    def _spelled_out(cls, value: Any) -> Any:
        """torch.float16 is recognised by its text, because this file does not import torch."""
        name = str(value).removeprefix("torch.").lower()
        return _SPELLINGS.get(name, name)

    @field_validator(*_EXAMPLES, mode="before")
    @classmethod
    def _split(cls, value: Any, info: ValidationInfo) -> Any:
        items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        is_texts = isinstance(items, list | tuple) and all(isinstance(item, str) for item in items)
        texts = tuple(filter(None, items)) if is_texts else ()
        if not is_texts or (isinstance(value, str) and value.strip() and not texts):
            raise OptionError(
                f"build option {info.field_name!r} cannot be {value!r:.80}: it must be a text, or a list of texts",
                at=f"{info.field_name}={value!r:.80}",
                fix=f"give a text, such as {info.field_name}={_EXAMPLES[info.field_name or '']!r}",
            )
        return texts

    @field_validator("lora", mode="before")
    @classmethod
    def _named_directories(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            value = [f"{name}={os.fspath(directory)}" for name, directory in value.items()]
        named = (value,) if isinstance(value, str) else tuple(value)
        for entry in named:
            if not isinstance(entry, str) or not all(part.strip() for part in entry.partition("=")):
                raise OptionError(
                    f"build option 'lora' cannot be {entry!r:.80}: it is NAME=DIRECTORY",
                    at=f"lora={entry!r:.80}",
                    fix="such as lora={'style': 'adapters/style'}",
                )
        return named

    @field_validator(*_PARSERS)
    @classmethod
    def _parses(cls, value: Any, info: ValidationInfo) -> Any:
        _PARSERS[info.field_name or ""](value)
        return value

    @field_validator("calibration", "speculative", mode="before")
    @classmethod
    def _is_path(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @property
    def adapters(self) -> dict[str, Path]:
        """The parsed value of `lora`."""
        named = (entry.partition("=") for entry in self.lora)
        return {name: Path(directory) for name, _, directory in named}

    @property
    def quantization(self) -> Quantization:
        """The parsed value of `quantize`."""
        return parse_quantization(self.quantize)

    @property
    def zeros(self) -> Sparsity:
        """The parsed value of `sparsity`."""
        return parse_sparsity(self.sparsity)

    @property
    def pruning(self) -> Pruning:
        """The parsed value of `prune`."""
        return parse_pruning(self.prune)


class BuildKeywords(TypedDict, total=False):
    """The fields of BuildOptions as keywords, for type checkers and editors, in the forms in which they are taken."""

    task: TaskChoice
    pooling: PoolingChoice
    dtype: DtypeSpelling
    kv_dtype: DtypeSpelling
    kv_cache: str
    kv_compression: str
    quantize: str | Sequence[str]
    sparsity: str | Sequence[str]
    prune: str | Sequence[str]
    calibration: str | PathLike[str] | None
    calibration_sequences: int
    calibration_length: int
    max_model_len: int | None
    max_batch_tokens: int
    max_sequences: int
    max_logit_rows: int | None
    block_size: int
    speculative: str | PathLike[str] | None
    lora: str | Sequence[str] | Mapping[str, str | PathLike[str]]
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    lora_targets: Sequence[str]
    tensor_parallel_size: int
    enable_expert_parallel: bool
    pipeline_parallel_size: int
    disable_passes: Sequence[str]
    stop_after: int | None
    finish_cut: bool
    allow_fallback: Sequence[Contract]
    check_passes: bool
    strict: bool


def is_dtype(text: str) -> bool:
    """Whether the text is auto or spells a dtype of floating-point numbers."""
    name = text.removeprefix("torch.").lower()
    return _SPELLINGS.get(name, name) in get_args(Dtype)


def build_defaults() -> dict[str, Any]:
    """Return each build option's default, by name."""
    return {name: field.default for name, field in BuildOptions.model_fields.items()}


def parse_options(values: Mapping[str, object]) -> BuildOptions:
    """Validate keyword options; the error names the option, the value seen, and the nearest known name."""
    try:
        return BuildOptions.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = sorted(BuildOptions.model_fields)
            fix = did_you_mean(name, known).rstrip() or f"known options: {', '.join(known)}"
            raise OptionError(f"unknown build option {name!r}", at=f"{name}={first['input']!r}", fix=fix) from None
        raise OptionError(
            f"build option {name!r} cannot be {first['input']!r}: {first['msg']}",
            at=f"{name}={first['input']!r}",
            fix="see `llmc build --help` for the values of each option",
        ) from None
