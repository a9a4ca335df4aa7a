"""llmc: an ahead-of-time compiler for LLM inference.

`llmc.compile(model, target="cpu")` makes an engine, `llmc.load(path)` opens one. Importing this package is cheap:
torch is imported when something is compiled, and never to run a CPU engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmc.api.version import VERSION
from llmc.errors import LlmcError

if TYPE_CHECKING:
    from llmc import passes
    from llmc.compiler import build, compile
    from llmc.engines.llm import LLM
    from llmc.exporter import export
    from llmc.runtime.async_engine import AsyncEngine
    from llmc.runtime.engine import Engine
    from llmc.runtime.grammar.grammar import Grammar, GrammarKind
    from llmc.runtime.loading import load
    from llmc.runtime.requests.generation_request import GenerationRequest
    from llmc.runtime.sampling.sampling_params import SamplingParams
    from llmc.training.train_medusa import train_medusa

__version__ = VERSION
__all__ = [
    "LLM",
    "AsyncEngine",
    "Engine",
    "GenerationRequest",
    "Grammar",
    "GrammarKind",
    "LlmcError",
    "SamplingParams",
    "build",
    "compile",
    "export",
    "load",
    "passes",
    "train_medusa",
]

_HOMES = {
    "LLM": "llmc.engines.llm",
    "AsyncEngine": "llmc.runtime.async_engine",
    "GenerationRequest": "llmc.runtime.requests.generation_request",
    "Grammar": "llmc.runtime.grammar.grammar",
    "GrammarKind": "llmc.runtime.grammar.grammar",
    "build": "llmc.compiler",
    "compile": "llmc.compiler",
    "Engine": "llmc.runtime.engine",
    "export": "llmc.exporter",
    "load": "llmc.runtime.loading",
    "SamplingParams": "llmc.runtime.sampling.sampling_params",
    "train_medusa": "llmc.training.train_medusa",
}


def __getattr__(name: str) -> Any:
    if name == "passes":
        return importlib.import_module("llmc.passes")
    if name not in _HOMES:
        raise AttributeError(f"module 'llmc' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "__doc__"])
