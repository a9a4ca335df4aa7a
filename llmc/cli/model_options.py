"""Options about the model and its passes, for verbs that run the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from llmc.cli.cache_dtype import KvCacheDtype, KvCompression, cache_options
from llmc.cli.completion import complete_schemes
from llmc.cli.option_group import changed_options
from llmc.cli.target_option import DEFAULT_TARGET
from llmc.errors import OptionError
from llmc.options import BuildOptions, parse_options

if TYPE_CHECKING:
    from llmc.passes.rewrite import Pass

_DEFAULTS = BuildOptions()


@dataclass(frozen=True)
class ModelOptions:
    """Build options that control the passes, as given on the command line."""

    task: Annotated[str, Option(help="auto, generate, or a per-text output: embed, score, classify")] = _DEFAULTS.task
    pooling: Annotated[str, Option(help="pooling of embeddings: auto, last, cls, mean")] = _DEFAULTS.pooling
    dtype: Annotated[
        str, Option(help="dtype of weights and activations: auto, float32, bfloat16, or float16 on GPUs")
    ] = _DEFAULTS.dtype
    kv_cache_dtype: KvCacheDtype = "auto"
    kv_compression: KvCompression = "none"
    quantize: Annotated[
        list[str] | None,
        Option(
            help=(
                "quantization scheme, such as int4-gptq:g64, or PATTERN=SCHEME for some weights (repeatable, or "
                "comma-separated)"
            ),
            autocompletion=complete_schemes,
        ),
    ] = None
    sparsity: Annotated[
        list[str] | None,
        Option(
            help=(
                "zeros to make, such as sparsegpt:0.5 or wanda:2:4, or PATTERN=… for some weights (repeatable, or "
                "comma-separated)"
            )
        ),
    ] = None
    prune: Annotated[
        list[str] | None,
        Option(
            help=(
                "parts to remove: channels=0.125, heads=0.25, layers=2, values=0.5, or PATTERN=SHARE for some "
                "(repeatable, or comma-separated)"
            )
        ),
    ] = None
    calibration: Annotated[Path | None, Option(help="text or token file for methods that need data")] = None
    calibration_sequences: Annotated[int, Option(help="calibration sequences to read from it")] = (
        _DEFAULTS.calibration_sequences
    )
    calibration_length: Annotated[int, Option(help="tokens per calibration sequence")] = _DEFAULTS.calibration_length
    speculative: Annotated[
        str | None,
        Option(
            help=(
                "draft layers to build in: Medusa heads (file or directory), an EAGLE-3 or MTP checkpoint, or mtp "
                "for the model's own"
            ),
            metavar="PATH",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        Option(help="LoRA adapter to merge into the weights (repeatable)", metavar="NAME=DIR"),
    ] = None
    enable_lora: Annotated[
        bool, Option("--enable-lora", help="accept LoRA adapters at run time, without merging them into the weights")
    ] = False
    max_loras: Annotated[int, Option(help="with --enable-lora: maximum adapters in use at once")] = _DEFAULTS.max_loras
    max_lora_rank: Annotated[int, Option(help="with --enable-lora: maximum rank of an adapter")] = (
        _DEFAULTS.max_lora_rank
    )
    lora_targets: Annotated[
        list[str] | None,
        Option(help="with --enable-lora: modules such as q_proj (repeatable); default: all linear ones"),
    ] = None
    tensor_parallel_size: Annotated[int, Option(help="number of ranks that share the weights")] = (
        _DEFAULTS.tensor_parallel_size
    )
    enable_expert_parallel: Annotated[
        bool, Option("--enable-expert-parallel", help="divide experts among ranks, instead of their channels")
    ] = False
    pipeline_parallel_size: Annotated[int, Option(help="number of stages of layers, each on its own ranks")] = (
        _DEFAULTS.pipeline_parallel_size
    )
    disable_pass: Annotated[list[str] | None, Option(help="skip a pass by name (repeatable)")] = None
    allow_fallback: Annotated[
        list[str] | None, Option(help="continue if this check is not met, such as `quantized` (repeatable)")
    ] = None
    passes_from: Annotated[
        list[str] | None, Option(help="further passes: module:attribute or file.py:attribute (repeatable)")
    ] = None

    def values(self) -> dict[str, Any]:
        """The given options by the names of BuildOptions."""
        keywords = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "passes_from"}
        keywords["disable_passes"] = keywords.pop("disable_pass")
        keywords |= cache_options(keywords.pop("kv_cache_dtype"))
        for name in ("quantize", "sparsity", "prune"):  # One of them may be several, with commas between.
            keywords[name] = ",".join(keywords[name] or ())
        for name in ("lora", "lora_targets", "disable_passes", "allow_fallback"):
            keywords[name] = tuple(keywords[name] or ())
        return {**keywords, "calibration": None if self.calibration is None else str(self.calibration)}

    def parse(self, **more: Any) -> BuildOptions:
        """The parsed build options. more: Further options by the names of BuildOptions. Raises LlmcError for invalid
        values and for missing files and passes."""
        parsed = parse_options({**self.values(), **more})
        if parsed.disable_passes or parsed.calibration or parsed.lora:
            from llmc.passes.named_inputs import check_named_inputs

            check_named_inputs(self.passes(), parsed)
        return parsed

    def refuse_for_engine(self, target: str = DEFAULT_TARGET) -> None:
        """Raise OptionError if any option or a target other than the default was given."""
        chosen = (*self.chosen, *(() if target == DEFAULT_TARGET else (f"--target {target}",)))
        if chosen:
            raise OptionError(
                "an engine's passes have run already: they cannot be chosen",
                at=", ".join(chosen),
                fix="name the model directory, or leave the options out",
            )

    @property
    def chosen(self) -> tuple[str, ...]:
        """The options that differ from their defaults, as spelled on the command line."""
        return changed_options(self)

    def added_passes(self) -> tuple[Pass, ...] | None:
        """The default passes with those that --passes-from names; None if it names none."""
        if not self.passes_from:
            return None
        from llmc.passes.custom import load_passes
        from llmc.passes.pipeline import extended

        return extended(*(pass_ for reference in self.passes_from for pass_ in load_passes(reference)))

    def passes(self) -> tuple[Pass, ...]:
        """Return all passes that run."""
        from llmc.passes.pipeline import default

        return self.added_passes() or default()
