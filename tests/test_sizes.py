"""What fits on a screen or two is read as a whole: no long files, and no long functions outside Triton's kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import llmc
from tests.parsed_source import parsed

PACKAGE = Path(llmc.__file__).parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Longer files, which may only shrink.
LONGER = {
    "runtime/scheduling/scheduler.py": 464,
}


def test_no_file_is_longer_than_a_few_screens() -> None:
    paths = [p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".h", ".cpp", ".js", ".css")]
    lengths = {str(p.relative_to(PACKAGE)): len(p.read_text(encoding="utf-8").splitlines()) for p in paths}
    assert len(lengths) > 500
    assert {path: length for path, length in lengths.items() if length > LONGER.get(path, MAX_FILE_LINES)} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    """Kernels of Triton and Gluon are exempt: calls between them cost names for dozens of values."""
    long = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
                documentation = len((ast.get_docstring(node) or "").splitlines())
                lines = (node.end_lineno or node.lineno) - node.lineno + 1 - documentation
                if lines > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(PACKAGE)}:{node.name}"] = lines
    assert long == {}


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator) in ("triton.jit", "gluon.jit") for decorator in node.decorator_list)
