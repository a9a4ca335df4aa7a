"""What `make mutants` changes, and which tests it asks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutation.__main__ import ROOT, asked, candidates, sample
from tests.mutation.mutate import mutants
from tests.mutation.reach import Reach, with_probes
from tests.mutation.reasons import reasons
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


BRANCHES = """STEP = 1
def sign(a):
    if a < 0:
        return -1
    elif a > 0:
        return (
            1
        )
    return [
        0 for _ in range(1)
    ][0]
@triton.jit
def kernel(a):
    return a + 1
"""


def test_a_probe_stands_before_the_statement_of_a_mutant() -> None:
    constants = {mutant.line: mutant for mutant in mutants(BRANCHES) if mutant.kind == "constant"}
    assert {*constants} == {1, 3, 4, 5, 7, 10, 11, 14}
    probed, keys = with_probes(BRANCHES, {f"line {line}": mutant for line, mutant in constants.items()})
    assert sorted(keys) == ["line 10", "line 11", "line 3", "line 4", "line 5", "line 7"], "no import and no kernel"
    before = [line for line in probed.splitlines() if "probe" in line or line in BRANCHES.splitlines()]
    names = [re.sub(r".*reached\('(.*)'\)", r"\1", line).strip() for line in before]
    assert names[1:14] == [
        "def sign(a):", "line 3", "line 5", "if a < 0:", "line 4", "return -1", "elif a > 0:", "line 7", "return (",
        "1", ")", "line 10", "line 11",
    ]  # fmt: skip


def test_the_nearest_tests_are_asked_first_until_the_seconds_are_spent() -> None:
    file = Path("llmc/runtime/scheduling/scheduler.py")
    near, far = "tests/runtime/scheduling/test_scheduler.py::test_a", "tests/cli/test_run.py::test_b"
    other = "tests/runtime/scheduling/test_scheduler.py::test_c"
    reach = Reach({"reached": [far, near], "never": []}, {near: 2.0, far: 3.0, other: 1.0})
    assert asked(file, reach, "reached", 10) == [near, far, other]
    assert asked(file, reach, "reached", 4) == [near]
    for unknown in ("never", "run at import"):
        assert asked(file, reach, unknown, 10) == [other, near], "those of its room, the quick one first"


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


@pytest.mark.parametrize(("file", "before"), [key[:2] for key in reasons()])
def test_a_reason_stands_as_long_as_its_line(file: str, before: str) -> None:
    lines = [line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    assert before in "\n".join(lines)
