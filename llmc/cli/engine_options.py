"""Options of verbs that run an engine, for a model directory: its engine is built once and cached."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from typer import Option

from llmc.cli.cache_dtype import KvCacheDtype, KvCompressionOfEngine, cache_options
from llmc.cli.completion import complete_schemes, complete_targets


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the engine of a model directory is built."""

    panel: ClassVar[str] = "If MODEL is a model directory: how its engine is built"

    target: Annotated[
        str | None, Option(help="target (see `llmc targets`); default: cpu", autocompletion=complete_targets)
    ] = None
    dtype: Annotated[str, Option(help="dtype of weights and activations, as for `llmc build`")] = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    kv_compression: KvCompressionOfEngine = None
    quantize: Annotated[
        list[str] | None,
        Option(help="quantization scheme, as for `llmc build` (repeatable)", autocompletion=complete_schemes),
    ] = None
    calibration: Annotated[Path | None, Option(help="text or token file for schemes that need data")] = None

    def engine(self, path: Path, *, longest: int | None = None, **limits: int | None) -> Path:
        """Return the engine at `path`. For a model directory, take its engine from the cache or build it now.

        longest: The max_model_len that it must have. limits: others of a build, by the names of BuildOptions, which the
        caller applies to an engine that is built already, as it does `kv_compression`. None is the default. Raises
        OptionError for options that an engine which is built already cannot follow, and LlmcError.
        """
        from llmc.engine_format.manifest import is_engine
        from llmc.engines.engine_argument import check_follows, engine_of
        from llmc.options import parse_options
        from llmc.targets import resolve_target

        values = self._values() if longest is None else {**self._values(), "max_model_len": longest}
        if is_engine(path):
            # A load may choose another policy than the build.
            values.pop("kv_compression", None)
            check_follows(path, self.target, values)
            return path
        from llmc.cli.stage_bars import StageBars

        values |= {name: value for name, value in limits.items() if value is not None}
        parse_options(values)
        if self.target is not None:
            resolve_target(self.target)
        with StageBars() as shown:
            return engine_of(path, target=self.target, progress=shown, **values)

    def _values(self) -> dict[str, Any]:
        """The options by the names of BuildOptions."""
        return {
            "dtype": self.dtype,
            **cache_options(self.kv_cache_dtype),
            **({} if self.kv_compression is None else {"kv_compression": self.kv_compression}),
            "quantize": ",".join(self.quantize or ()),
            "calibration": None if self.calibration is None else str(self.calibration),
        }
