"""The package to install when a verb's optional dependency is missing."""

import sys
from importlib.util import find_spec

from llmc.errors import ToolchainError

# The extra of llmc-compiler that installs each module; None stands for the package's own dependencies.
EXTRAS: dict[str, str | None] = {
    "torch": None,
    "transformers": "hf",
    "triton": "gpu",
    "cuda": "gpu",
    "fastapi": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "uvloop": "serve",
    "httptools": "serve",
    "aiohttp": "serve",
    "jinja2": "serve",
    "prometheus_client": "serve",
    "llguidance": "serve",
    "yaml": "serve",
    "ray": "ray",
    "graphviz": "viz",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "matplotlib": "plot",
}


def require_extra(extra: str, at: str) -> None:
    """Raise ToolchainError unless every module of an extra is installed. at: the feature that needs it."""
    missing = [module for module, of in EXTRAS.items() if of == extra and find_spec(module) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ToolchainError(
            f"this needs {', '.join(missing)}, which {verb} not installed",
            at=at,
            fix=f"pip install 'llmc-compiler[{extra}]'",
        )


def missing_package(error: ModuleNotFoundError) -> ToolchainError | None:
    """The error to show; None for a module that no extra of llmc installs, whose absence is a bug in llmc."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return None
    extra = EXTRAS[module]
    verb = " ".join(["llmc", *sys.argv[1:2]])
    fix = f"pip install {module}" if extra is None else f"pip install 'llmc-compiler[{extra}]'"
    return ToolchainError(f"this needs the package {module}, which is not installed", at=verb, fix=fix)
