"""Which tests reach each mutant's statement: found by running all of them once, in a copy of the tree with probes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutate import Mutant

PROBE = "__import__('tests.mutation.probe', fromlist=['reached']).reached({key!r})"


@dataclass(frozen=True)
class Reach:
    """tests: of each mutant whose statement can have a probe, those that reach it; seconds: of each test, with what it
    needs first."""

    tests: dict[str, list[str]]
    seconds: dict[str, float]


def with_probes(source: str, found: dict[str, Mutant]) -> tuple[str, list[str]]:
    """The file with a call before the statement of each mutant that is inside a function; and which mutants are."""
    lines = source.splitlines()
    probes: dict[int, list[str]] = defaultdict(list)
    for key, mutant in found.items():
        line = _statement(source, mutant.line)
        if line is not None:
            probes[line].append(key)
    for line in sorted(probes, reverse=True):
        indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
        lines[line - 1 : line - 1] = [indent + PROBE.format(key=key) for key in probes[line]]
    return "\n".join(lines) + "\n", [key for keys in probes.values() for key in keys]


def reach_of(chosen: dict[str, tuple[Path, Mutant]], copy: Path, environment: dict[str, str], jobs: int) -> Reach:
    """Put probes for these mutants into a copy of the tree, and run its suite."""
    by_file: dict[Path, dict[str, Mutant]] = defaultdict(dict)
    for key, (file, mutant) in chosen.items():
        by_file[file][key] = mutant
    tests: dict[str, list[str]] = {}
    for file, mutants in by_file.items():
        changed, probed = with_probes((copy / file).read_text(encoding="utf-8"), mutants)
        (copy / file).write_text(changed, encoding="utf-8")
        tests.update((key, []) for key in probed)
    record = copy / "build" / "reached.tsv"
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutation.probe"]
    workers = ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
    subprocess.run([*command, *workers], cwd=copy, env=environment, check=False, stdout=sys.stderr)
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    for line in record.read_text(encoding="utf-8").splitlines():
        what, _, test = line.partition("\t")
        took, _, phase = what.partition("s ")
        if phase:
            seconds[test][phase] = float(took)
        elif test not in tests[what]:
            tests[what].append(test)
    for key, names in tests.items():
        of_files = [test for test in seconds if test.partition("::")[0] in names]
        tests[key] = [*dict.fromkeys([*(name for name in names if "::" in name), *of_files])]
    return Reach(tests, {test: sum(phases.values()) for test, phases in seconds.items()})


def _statement(source: str, line: int) -> int | None:
    """The line where the innermost statement in a function that spans `line` begins, if a call can stand before it."""
    begins = [
        min([statement.lineno, *(decorator.lineno for decorator in getattr(statement, "decorator_list", []))])
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_compiled(function)
        for block in _blocks(function)
        for statement in block
        if statement.lineno <= line <= (statement.end_lineno or 0)
    ]
    lines = source.splitlines()
    return max((begin for begin in begins if not lines[begin - 1].lstrip().startswith("elif ")), default=None)


def _blocks(function: ast.AST) -> list[list[ast.stmt]]:
    blocks = (getattr(node, name, []) for node in ast.walk(function) for name in ("body", "orelse", "finalbody"))
    return [block for block in blocks if isinstance(block, list)]


def _is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton's kernels are another language: they know no probe."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
