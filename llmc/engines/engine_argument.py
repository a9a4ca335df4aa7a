"""Find the engine for an argument that may be an engine or a model directory, and check that it is the requested
one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from llmc.engine_format import engine_files
from llmc.engine_format.manifest import Manifest, is_engine, read_manifest
from llmc.engine_format.reader import read_quantization
from llmc.errors import OptionError
from llmc.plural import counted
from llmc.targets import is_cpu_target, resolve_target

if TYPE_CHECKING:
    from llmc.api.build_stages import Progress
    from llmc.options import BuildKeywords


def engine_of(
    model: Path, *, target: str | None = None, progress: Progress | None = None, **options: Unpack[BuildKeywords]
) -> Path:
    """`model` itself if it is an engine; that of a model directory is found in the engine cache, or built now.

    target: None is `cpu` for a build, and whatever an engine is for. options: as in llmc.build. Raises OptionError for
    those that the engine does not follow, and LlmcError.
    """
    if is_engine(model):
        check_follows(model, target, options)
        return model
    # Here, because it takes a while to import, and an engine does without.
    from llmc.engines.engine_cache import find_or_build_engine

    return find_or_build_engine(model, target="cpu" if target is None else target, progress=progress, **options)


def check_follows(engine: Path, target: str | None, options: Mapping[str, object]) -> None:
    """Raise OptionError for a target or an option of llmc.build that the engine was not built with.

    None, auto and empty values express no requirement.
    """
    wishes = {name: value for name, value in options.items() if value not in (None, "auto", "", (), [], False)}
    if target in (None, "auto") and not options:
        return
    manifest = read_manifest(engine)
    if target is not None and target != "auto" and not _is_for(manifest, target):
        raise _not_so(engine, manifest, f"target={target!r}", f"--target {target}")
    if not options:
        return
    from llmc.options import parse_options

    parsed = parse_options(options).model_dump(mode="json")
    for name in wishes:
        if parsed[name] != _built_with(manifest, name) and not (
            name == "quantize" and parsed[name] == _schemes(engine, manifest)
        ):
            value = parsed[name]
            flag = name.replace("_", "-")
            text = ",".join(value) if isinstance(value, list) else value
            raise _not_so(engine, manifest, f"{name}={text!r}", f"--{flag}" if value is True else f"--{flag} {text}")


def _is_for(manifest: Manifest, target: str) -> bool:
    if target == "cpu":  # This machine's; whether it can run the engine is seen when that is opened.
        return is_cpu_target(manifest.target.name)
    return resolve_target(target).name == manifest.target.name


def _built_with(manifest: Manifest, name: str) -> Any:
    from llmc.options import BuildOptions

    # An engine that is older than the option has its default.
    value = manifest.options.get(name, getattr(BuildOptions(), name))
    if name == "dtype" or (name == "kv_dtype" and value == "auto"):
        return manifest.model.dtype
    if name in ("max_model_len", "max_batch_tokens", "max_sequences", "max_logit_rows", "block_size"):
        return getattr(manifest.limits, name)
    return value


def _schemes(engine: Path, manifest: Manifest) -> list[str]:
    """The schemes that were requested or came with the checkpoint, by descending number of weights."""
    schemes = [scheme for scheme in manifest.options.get("quantize") or () if scheme != "none"]
    if schemes:
        return schemes
    counts = Counter(weight.scheme for weight in read_quantization(engine_files(engine)))
    return [scheme for scheme, _ in counts.most_common()]


def _not_so(engine: Path, manifest: Manifest, wish: str, flags: str) -> OptionError:
    scheme = ", ".join(_schemes(engine, manifest)) or "not quantized"
    longest = f"up to {counted(manifest.limits.max_model_len, 'token')}"
    return OptionError(
        f"the engine was built without {wish}: it is for {manifest.target.name}, in {manifest.model.dtype}, {scheme}, "
        f"{longest}",
        at=f"{wish} with {engine}",
        fix=f"leave that out, give the model directory instead, or build another: llmc build MODEL {flags} -o ENGINE",
    )
