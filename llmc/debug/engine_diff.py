"""Differences between two engines: options, passes, graphs, kernels, weights, sizes and logits."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.debug.compare import Comparison, compare
from llmc.debug.sample_tokens import Sample, sample_tokens
from llmc.engine_format import EngineDirectory, read_engine
from llmc.engine_format.reader import read_quantization
from llmc.errors import LlmcError
from llmc.files.typed_json import to_json
from llmc.plural import counted
from llmc.runtime.loading import load


@dataclass(frozen=True)
class Change:
    """A difference of two engines. section: its heading. first, second: the values; None if an engine has none."""

    section: str
    name: str
    first: str | None
    second: str | None


@dataclass(frozen=True)
class EngineDifference:
    """The differences of two engines. changes: by section, in the order of a build. logits: the second engine against
    the first; None if they could not be compared, and why_not says why. tokens: what they were compared on."""

    changes: tuple[Change, ...]
    logits: Comparison | None
    why_not: str | None
    tokens: tuple[int, ...]


def diff_engines(first: Path, second: Path, sample: Sample | None = None) -> EngineDifference:
    """Compare two engine directories, and run both on the same tokens if this machine can.

    sample: tokens for both engines, made with the first one's tokenizer; None takes the default sample. Raises
    EngineFormatError if a directory is not a complete engine, OptionError if the tokens do not fit.
    """
    one, two = (read_engine(path, check_machine=False) for path in (first, second))
    changes = tuple(_changes(one, two))
    if one.manifest.model.vocab_size != two.manifest.model.vocab_size:
        sizes = f"{one.manifest.model.vocab_size} and {two.manifest.model.vocab_size}"
        return EngineDifference(changes, None, f"their vocabularies have {sizes} tokens", ())
    ids = sample_tokens(
        first / "tokenizer" / "tokenizer.json",
        one.manifest.model.vocab_size,
        sample,
        min(e.manifest.limits.max_model_len for e in (one, two)),
    )
    try:
        with load(first, check_weights=False) as a, load(second, check_weights=False) as b:
            return EngineDifference(changes, compare(b.logits, a.logits, [ids]), None, ids)
    except LlmcError as error:
        return EngineDifference(changes, None, error.problem, ids)


def _changes(one: EngineDirectory, two: EngineDirectory) -> Iterator[Change]:
    sections = (
        ("model", lambda e: _flat(to_json(e.manifest.model))),
        ("target", lambda e: _flat(to_json(e.manifest.target))),
        ("option", lambda e: _flat(e.manifest.options)),
        ("limit", lambda e: _flat(to_json(e.manifest.limits))),
        ("pass", _passes),
        ("graph", _graphs),
        ("kernel", _kernels),
        ("weight", _weights),
        ("quantized weight", _quantized),
        ("size", _sizes),
        ("built by", lambda e: {"llmc": e.manifest.llmc_version}),
    )
    for section, read in sections:
        first, second = read(one), read(two)
        for name in dict.fromkeys((*first, *second)):
            if first.get(name) != second.get(name):
                yield Change(section, name, first.get(name), second.get(name))


def _flat(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _passes(engine: EngineDirectory) -> dict[str, str]:
    """Passes that did nothing are as good as absent."""
    return {
        p.name: f"{counted(p.rewrites, 'rewrite')}, {p.refusals} refused"
        for p in engine.manifest.passes
        if p.rewrites or p.refusals
    }


def _graphs(engine: EngineDirectory) -> dict[str, str]:
    """The hash of the graph after each pass; file names carry the pass's position, which may differ."""
    return {
        Path(name).stem.partition("-")[2]: record.sha256[0][:12] if record.sha256 else name
        for name, record in engine.manifest.files.items()
        if name.startswith("report/graphs/")
    }


def _kernels(engine: EngineDirectory) -> dict[str, str]:
    launches = (x for x in engine.program.launches if x.runs(tokens=1, logit_rows=1))
    return {
        name: f"{counted(count, 'launch')} per decode step"
        for name, count in sorted(Counter(x.kernel for x in launches).items())
    }


def _weights(engine: EngineDirectory) -> dict[str, str]:
    return {w.name: f"{w.dtype} {[*w.shape]} {w.layout.value}, {w.nbytes} bytes" for w in engine.program.weights}


def _quantized(engine: EngineDirectory) -> dict[str, str]:
    return {
        w.module: f"{w.scheme}, {w.bits:.3f} bits"
        + ("" if w.error is None else f", {w.error:.2%} error of the {'output' if w.is_output_error else 'weight'}")
        for w in read_quantization(engine.files)
    }


def _sizes(engine: EngineDirectory) -> dict[str, str]:
    manifest = engine.manifest
    total = sum(record.bytes for record in manifest.files.values())
    predicted = {name: f"{value:.4g}" for name, value in manifest.cost.items()}
    return {"engine": str(total), **_flat(manifest.memory), **predicted}
