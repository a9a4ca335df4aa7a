"""Imports go one way through the house; this walks every import statement with ast and holds it."""

from __future__ import annotations

import ast
from pathlib import Path

import networkx as nx

from llmc.engines import engine_cache
from llmc.frontends.transformers import capture_cache
from tests.parsed_source import parsed

PACKAGE = Path(__file__).parent.parent / "llmc"

FOUNDATION = {
    "adapters",
    "api",
    "errors",
    "settings",
    "options",
    "targets",
    "program",
    "formats",
    "cache",
    "files",
    "processes",
    "plural",
}
# What each room may import, beside itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "settings": {"errors"},
    "api": set(),
    "plural": set(),
    "formats": {"errors"},
    "options": {"errors", "formats"},
    "targets": {"errors"},
    "files": {"errors"},
    "adapters": {"errors", "files"},
    "program": {"errors", "files", "formats"},
    "processes": {"errors"},
    "cache": {"errors", "files", "settings"},
    "graph": FOUNDATION,
    "ops": FOUNDATION | {"graph"},
    "frontends": FOUNDATION | {"graph", "ops"},
    "passes": FOUNDATION | {"graph", "ops"},
    "ptx": {"errors"},
    "engine_format": FOUNDATION,
    "prediction": FOUNDATION,
    "codegen": FOUNDATION | {"graph", "ops", "engine_format", "prediction"},
    "runtime": FOUNDATION | {"graph", "ops", "engine_format", "prediction", "ptx"},
    "bench": FOUNDATION | {"engine_format", "runtime"},
    "report": FOUNDATION | {"graph", "ops", "passes", "codegen", "engine_format", "prediction"},
    "debug": FOUNDATION
    | {"graph", "ops", "frontends", "passes", "codegen", "engine_format", "prediction", "runtime", "report"},
}
ALLOWED["simulation"] = {*ALLOWED}
ALLOWED["tuning"] = FOUNDATION | {"codegen", "engine_format", "runtime"}
ALLOWED["compiler"] = {*ALLOWED}
ALLOWED["exporter"] = {*ALLOWED}
ALLOWED["architectures"] = {*ALLOWED}
ALLOWED["engines"] = {*ALLOWED, "__init__"}
ALLOWED["training"] = {*ALLOWED}
ALLOWED["__init__"] = {*ALLOWED}
ALLOWED["__main__"] = {"cli"}
ALLOWED["cli"] = {*ALLOWED, "__init__"}


def room_of(module: str) -> str:
    """The second part of a dotted llmc module name; the package itself is `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, module) of each import of llmc in a file, wherever it stands."""
    imports: list[tuple[int, str]] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            imports += [
                (node.lineno, f"{node.module}.{alias.name}" if node.module == "llmc" else str(node.module))
                for alias in node.names
            ]
    return [(line, module) for line, module in imports if module.split(".")[0] == "llmc"]


def test_imports_go_one_way() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        allowed = {room, *ALLOWED[room]}
        imports = [module for module in imported_modules(path) if room_of(module[1]) not in allowed]
        wrong += [f"{path}:{line}: {room} may not import {module}" for line, module in imports]
    assert wrong == []


def test_shared_code_generation_knows_no_backend() -> None:
    backends = ("llmc.codegen.cpp", "llmc.codegen.triton")
    for path in (PACKAGE / "codegen").glob("*.py"):
        imported = [
            f"{path}:{line}: {module}" for line, module in imported_modules(path) if module.startswith(backends)
        ]
        assert imported == []


def test_executors_know_nothing_of_ranks() -> None:
    """They are opened by engine_kinds' table, and by ranks, which know executors."""
    files = sorted((PACKAGE / "runtime" / "executors").rglob("*.py"))
    imports = [(path.name, module) for path in files for _, module in imported_modules(path)]
    assert [entry for entry in imports if entry[1].startswith("llmc.runtime.ranks")] == []


def test_caches_know_every_room_that_makes_what_they_keep() -> None:
    """A change of a room that is not in the digest would find what the code before it made."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    keepers = {"cache", "processes"}
    for digested, makers in (
        (capture_cache.OWN_ROOMS, {"frontends"}),
        (engine_cache.BUILDING_ROOMS, {"frontends", "passes", "codegen", "engine_format"}),
    ):
        rooms = makers | {room for maker in makers for room in ALLOWED[maker]}
        assert set(digested) == rooms & folders - keepers


def test_no_file_needs_itself() -> None:
    assert circles(PACKAGE) == []


def test_circles_of_types_and_within_functions_are_found(tmp_path: Path) -> None:
    package = tmp_path / "llmc"
    package.mkdir()
    (package / "step.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from llmc import step_plan\n"
    )
    (package / "step_plan.py").write_text("try:\n    pass\nexcept OSError:\n    from llmc.step import Step\n")
    (package / "first.py").write_text("def f():\n    from llmc.second import g\n")
    (package / "second.py").write_text("import llmc.first\n")
    assert sorted(circles(package)) == [["llmc.first", "llmc.second"], ["llmc.step", "llmc.step_plan"]]


def circles(package: Path) -> list[list[str]]:
    """Files whose imports come back to them, those for types and those within functions included."""
    graph = nx.DiGraph()
    files = {_module_of(path, package): path for path in package.rglob("*.py")}
    for module, path in files.items():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            inner = [name for name in names if name in files and not f"{module}.".startswith(f"{name}.")]
            graph.add_edges_from((module, name) for name in inner)
    return [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]


def _module_of(path: Path, package: Path) -> str:
    parts = (package.name, *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_root_names_are_symlinks_into_the_package() -> None:
    for name in ("passes", "codegen", "runtime"):
        link = PACKAGE.parent / name
        assert link.is_symlink(), f"{name} is not a symlink"
        assert link.resolve() == (PACKAGE / name).resolve()
