"""Which tests are those of a file: found by the names that files, folders and imports have."""

from __future__ import annotations

import re
from pathlib import Path

# What compiles and runs whole models is held by the tests that do.
WHOLE = "end_to_end"
# The rewrites of every pass, and the examples that they stand with, are proved in another room.
PROOFS = {"passes": Path("debug", "prove", "test_built_in.py")}


def room_of(module: Path) -> str:
    """The room of a file, as llmc/runtime/server/app.py has `runtime/server`; the package's own is `llmc`."""
    parts = module.parts[1:-1]
    return "/".join(parts[:2]) if parts else "llmc"


def own_tests(module: Path, root: Path) -> list[Path]:
    """The test files that have the file's name, that import it, or what tests share that does, and that speak of it:
    of what has its name, or of an op of its own. In this order, shorter ones first."""
    tests = _files(root / "tests")
    shared = [path for path in sorted((root / "tests").rglob("*.py")) if path not in tests]
    wanted = [module, *(path.relative_to(root) for path in shared if _imports(path, [module]))]
    named, importing, speaking = [], [], []
    spoken = _spoken(root / module)
    for path in tests:
        if module.stem in path.stem and module.stem != "__init__":
            named.append(path)
        elif _imports(path, wanted):
            importing.append(path)
        elif spoken.search(path.read_text(encoding="utf-8")):
            speaking.append(path)
    rooms = [root / "tests" / part for part in ("/".join(module.parts[1:-1]), module.parts[1])]

    def nearness(path: Path) -> tuple[int, int]:
        return sum(room not in path.parents for room in rooms), path.stat().st_size

    return [path for group in (named, importing, speaking) for path in sorted(group, key=nearness)]


def room_tests(module: Path, root: Path) -> list[Path]:
    """The test files of its room: those in the folders with the names of its own, and of what lies above them."""
    tests, parts = root / "tests", module.parts[1:-1]
    if not parts:
        return [*sorted(tests.glob("test_*.py")), *_files(tests / WHOLE)]
    files = _files(tests.joinpath(*parts))
    for depth in range(len(parts) - 1, 0, -1):
        files += sorted(tests.joinpath(*parts[:depth]).glob("test_*.py"))
    files += [path for path in tests.glob("test_*.py") if parts[0].rstrip("s") in path.stem]
    files += [tests / PROOFS[parts[0]]] if parts[0] in PROOFS else []
    return files or _files(tests / WHOLE)


def _spoken(module: Path) -> re.Pattern[str]:
    """What a test that uses a file without importing it says: a name of two words or more, or an op's."""
    ops = re.findall(r"^@op\(.*?^def (\w+)", module.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names = [*ops, *([module.stem] if "_" in module.stem.strip("_") else [])]
    return re.compile(rf"\b({'|'.join(names)})\b" if names else "(?!)")


def _imports(path: Path, modules: list[Path]) -> bool:
    text = path.read_text(encoding="utf-8")
    dotted = (".".join(module.with_suffix("").parts).removesuffix(".__init__") for module in modules)
    return any(f"{name} " in text or f"{name}\n" in text for name in dotted)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("test_*.py"))
