"""What `make mutants` changes, and which tests it asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.__main__ import ROOT, candidates, sample
from tests.mutation.mutate import mutants
from tests.mutation.rooms import own_tests, room_of, room_tests

SOURCE = '''"""A text with 1 < 2."""
def add(a: int, b: int = 3) -> int:
    """Not 4 either."""
    assert a < 5, "nor this"
    if a < b:
        raise ValueError(f"{a + 1}")
    self.x = use(a, "ü", b)[: a + 1]
    wait(timeout=7)
    return a
'''


def test_each_kind_of_change_and_nothing_that_only_readers_see() -> None:
    changed = {(m.line, m.kind): m.applied(SOURCE).splitlines()[m.line - 1].strip() for m in mutants(SOURCE)}
    assert changed == {
        (2, "constant"): "def add(a: int, b: int = 4) -> int:",
        (5, "operator"): "if (a <= b):",
        (5, "boundary"): "if (a < b + 1):",
        (5, "branch"): "pass",
        (6, "dropped statement"): "pass",
        (7, "swapped arguments"): "self.x = (use('ü', a, b))[: a + 1]",
        (7, "boundary"): "self.x = (use(a, 'ü', b)[:a + 1 - 1])",
        (7, "operator"): 'self.x = use(a, "ü", b)[: (a - 1)]',
        (7, "constant"): 'self.x = use(a, "ü", b)[: a + 2]',
        (7, "dropped statement"): "pass",
        (8, "dropped statement"): "pass",
        (9, "dropped statement"): "return None",
    }


@pytest.mark.slow
def test_a_sample_is_of_all_rooms_and_always_the_same() -> None:
    chosen = sample(40, 1, None)
    assert chosen == sample(40, 1, None) != sample(40, 2, None)
    assert {room_of(file) for file, _ in chosen} == set(candidates())
    assert {file for file, _ in sample(40, 1, "cache")} <= {file for file, _ in chosen}


def test_a_file_has_tests_of_its_own_and_of_its_room() -> None:
    file = Path("llmc/runtime/scheduling/scheduler.py")
    first, rest = own_tests(file, ROOT), room_tests(file, ROOT)
    assert first[0].name.startswith("test_scheduler") and "test_engine.py" in {path.name for path in rest}
    shared = own_tests(Path("llmc/runtime/loop/publish.py"), ROOT)
    assert ROOT / "tests/runtime/scheduling/test_scheduler.py" in shared, "it is what the model-free runs call"
    passes = room_tests(Path("llmc/passes/canonical/merge_duplicates.py"), ROOT)
    assert ROOT / "tests/debug/prove/test_built_in.py" in passes, "its example is proved there"
    rooms = {room_of(path): path for path in (p.relative_to(ROOT) for p in (ROOT / "llmc").rglob("*.py"))}
    assert all(room_tests(path, ROOT) for path in rooms.values())
