"""Whether the packages are there that ONNX needs; without them nothing else of this room can be imported."""

from importlib.util import find_spec

from llmc.errors import ToolchainError


def require_onnx(at: str, *others: str) -> None:
    """Raise ToolchainError without the package onnx, or one of others. at: what needs it."""
    missing = next((name for name in ("onnx", *others) if find_spec(name) is None), None)
    if missing is not None:
        raise ToolchainError(
            f"this needs the Python package {missing}, which is not installed",
            at=at,
            fix="pip install 'llmc-compiler[onnx]'",
        )
