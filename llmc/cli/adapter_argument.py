"""`--lora NAME=DIR` of the verbs that run an engine: one adapter beside its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmc.errors import OptionError

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine


def built_for(lora: str | None) -> dict[str, Any]:
    """What a model directory's engine is built with, to take this adapter. Raises AdapterError."""
    if lora is None:
        return {}
    from llmc.adapters.adapter import read_adapter
    from llmc.options import BuildOptions

    _, directory = named(lora)
    ranks = [module.rank for module in read_adapter(directory).modules.values()]
    return {"enable_lora": True, "max_lora_rank": max([BuildOptions().max_lora_rank, *ranks])}


def load_adapter(engine: Engine, lora: str) -> str:
    """Load it, and return its name. Raises AdapterError."""
    name, directory = named(lora)
    engine.load_adapter(name, directory)
    return name


def named(lora: str) -> tuple[str, str]:
    """Name and directory. Raises OptionError."""
    name, _, directory = lora.partition("=")
    if not name.strip() or not directory.strip():
        raise OptionError(
            f"{lora!r:.80} is not NAME=DIR", at=f"--lora {lora}", fix="such as --lora style=adapters/style"
        )
    return name, directory
