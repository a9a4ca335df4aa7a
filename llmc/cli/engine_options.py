"""What verbs that run an engine take of a model directory: its engine is built once and found again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from typer import Option

from llmc.cli.completion import complete_schemes, complete_targets
from llmc.cli.option_group import changed_options
from llmc.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the engine of a model directory is built."""

    panel: ClassVar[str] = "If MODEL is a model directory: how its engine is built"

    target: Annotated[str, Option(help="see `llmc targets`", autocompletion=complete_targets)] = "cpu"
    dtype: Annotated[str, Option(help="of weights and activations, as for `llmc build`")] = "auto"
    kv_cache_dtype: Annotated[str, Option(help="of the KV cache")] = "auto"
    quantize: Annotated[
        list[str] | None, Option(help="scheme, as for `llmc build` (repeatable)", autocompletion=complete_schemes)
    ] = None
    calibration: Annotated[Path | None, Option(help="text or token file for schemes that look at data")] = None

    def engine(self, path: Path, **limits: int | None) -> Path:
        """The engine at `path`, or that of the model directory there, from the engine cache or built now.

        limits: of a step, by the names of BuildOptions; None is the default. Raises OptionError for options that an
        engine which is built already cannot follow, and LlmcError.
        """
        from llmc.engine_format.manifest import is_engine
        from llmc.options import parse_options
        from llmc.targets import resolve_target

        if is_engine(path):
            self._refuse_for_engine(path)
            return path
        from llmc.cli.stage_bars import StageBars
        from llmc.engine_cache import find_or_build_engine

        values = {**self._values(), **{name: value for name, value in limits.items() if value is not None}}
        parse_options(values)
        resolve_target(self.target)
        with StageBars() as shown:
            return find_or_build_engine(path, target=self.target, progress=shown, **values)

    def _values(self) -> dict[str, Any]:
        """By the names of BuildOptions."""
        return {
            "dtype": self.dtype,
            "kv_dtype": self.kv_cache_dtype,
            "quantize": ",".join(self.quantize or ()),
            "calibration": None if self.calibration is None else str(self.calibration),
        }

    def _refuse_for_engine(self, path: Path) -> None:
        changed = changed_options(self)
        if changed:
            raise OptionError(
                "this is an engine, which is built already: how cannot be chosen any more",
                at=f"{' '.join(changed)} with {path}",
                fix="leave the options out, or name the model directory",
            )
