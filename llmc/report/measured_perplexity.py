"""The perplexity that `llmc verify --perplexity TEXT --json FILE` measured, as the report shows it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.engine_format import EngineDirectory, Manifest
from llmc.errors import EngineFormatError
from llmc.files.typed_json import to_json
from llmc.report.measurement_file import read_measurement

PERPLEXITY_VERSION = 1


@dataclass(frozen=True)
class MeasuredPerplexity:
    """An engine's perplexity over a text, and that of the unquantized source model in the same dtype.

    model, quantize, kv_cache: the engine's, to identify it. text: the file's name. tokens: number of predicted tokens.
    length: length of the windows that the text was cut into, in tokens.
    """

    version: int
    model: str
    quantize: tuple[str, ...]
    kv_cache: str
    dtype: str
    text: str
    tokens: int
    length: int
    perplexity: float
    reference: float

    @property
    def ratio(self) -> float:
        """The engine's perplexity over the model's."""
        return self.perplexity / self.reference


def measured_perplexity(
    manifest: Manifest, text: Path, length: int, tokens: int, perplexity: float, reference: float
) -> MeasuredPerplexity:
    """The figures, with the identity of the engine."""
    options: dict[str, Any] = manifest.options
    return MeasuredPerplexity(
        version=PERPLEXITY_VERSION,
        model=manifest.model.name,
        quantize=tuple(options["quantize"]),
        kv_cache=options["kv_cache"],
        dtype=manifest.model.dtype,
        text=text.name,
        tokens=tokens,
        length=length,
        perplexity=perplexity,
        reference=reference,
    )


def perplexity_json(measured: MeasuredPerplexity) -> str:
    """The text of the file."""
    return json.dumps(to_json(measured), indent=1, ensure_ascii=False) + "\n"


def read_perplexity(path: Path, directory: EngineDirectory) -> MeasuredPerplexity:
    """Read a measured perplexity. Raises EngineFormatError for a file that cannot be read, or that belongs to another
    engine."""
    fix = f"measure it again: llmc verify {directory.path} --against MODEL --perplexity TEXT --json FILE"
    measured = read_measurement(MeasuredPerplexity, path, name="perplexity", version=PERPLEXITY_VERSION, fix=fix)
    manifest = directory.manifest
    wanted = (manifest.model.name, tuple(manifest.options["quantize"]), manifest.options["kv_cache"])
    if (measured.model, measured.quantize, measured.kv_cache) != wanted:
        spelled = ",".join(measured.quantize) or "unquantized"
        raise EngineFormatError(
            f"the perplexity is of another engine ({measured.model}, {spelled}, KV cache {measured.kv_cache}) "
            f"than {directory.path}",
            at=path,
            fix=fix,
        )
    return measured
