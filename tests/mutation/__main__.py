"""How many of a seeded sample of mutants the tests of their rooms kill.

    make mutants                      # 200 of them; hours of a core
    python -m tests.mutation --count 60 --only runtime
    python -m tests.mutation --survivors

Each is tried in a copy of the working tree, against the tests that reach its statement, the nearest first, until one
fails. Which do is found by running all tests once (tests/mutation/reach.py). What has been tried is kept in
build/mutants, and not tried again. Survivors that no test can tell have a reason (tests/mutation/reasons.toml).
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.mutate import Mutant, mutants
from tests.mutation.reach import Reach, reach_of
from tests.mutation.reasons import reason_of
from tests.mutation.rooms import own_tests, room_of, room_tests
from tests.mutation.warm_pytest import WarmPytest

ROOT = Path(__file__).parent.parent.parent
WORK = ROOT / "build" / "mutants"
# No test here can run it; those with `-m gpu` do.
ON_DEVICES = (ROOT / "llmc" / "runtime" / "executors" / "cuda.py",)


@dataclass(frozen=True)
class Trial:
    """A mutant that was tried. killed_by: the test that failed, or what else happened; empty if it survived."""

    key: str
    file: str
    line: int
    kind: str
    diff: str
    killed_by: str


def sample(count: int, seed: int, only: str | None) -> list[tuple[Path, Mutant]]:
    """Mutants from all rooms: from each about as the square root of how many it has, and one of a statement."""
    rooms = candidates()
    weights = {room: len(found) ** 0.5 for room, found in rooms.items()}
    chosen = []
    for room, room_mutants in sorted(rooms.items()):
        share = max(1, round(count * weights[room] / sum(weights.values())))
        kinds: dict[str, list[tuple[Path, Mutant]]] = defaultdict(list)
        for pair in room_mutants:
            kinds[pair[1].kind].append(pair)
        dice = random.Random(f"{seed} {room}")
        names = sorted(kinds)
        for number in range(share):
            chosen.append(dice.choice(kinds[names[number % len(names)]]))
    random.Random(seed).shuffle(chosen)
    return [entry for entry in chosen if only is None or room_of(entry[0]).startswith(only)]


@cache
def candidates() -> dict[str, list[tuple[Path, Mutant]]]:
    """All mutants by room."""
    rooms: dict[str, list[tuple[Path, Mutant]]] = defaultdict(list)
    for path in sorted({*(ROOT / "llmc").rglob("*.py")} - {*ON_DEVICES}):
        file = path.relative_to(ROOT)
        rooms[room_of(file)] += [(file, mutant) for mutant in mutants(path.read_text(encoding="utf-8"))]
    return {room: room_mutants for room, room_mutants in rooms.items() if room_mutants}


def copy_of_the_tree(name: str) -> Path:
    """The working tree as it is, in a folder of its own, with a cache that starts with this machine's kernels."""
    copy = WORK / name
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(copy)], check=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for path in copy.rglob("*"):
        if path.is_file() and ".git" not in path.parts and str(path.relative_to(copy)) not in listed:
            path.unlink()
    for name in filter(None, listed):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def environment(copy: Path) -> dict[str, str]:
    """Python finds the copy's llmc first. Its cache holds what this tree has made, and nothing that a mutant has."""
    from llmc.cache import CacheKind, open_cache

    cache = copy / "build" / "cache"
    cache.mkdir(parents=True, mode=0o700, exist_ok=True)
    kept = ("captures", "gpu-kernels", "kernels", "programs", "triton")
    for made in cache.iterdir():
        if made.is_dir() and made.name not in kept:
            shutil.rmtree(made)
    for kind in kept:
        link_again(open_cache(CacheKind(kind)).path, cache / kind)
    return {**os.environ, "PYTHONPATH": str(copy), "LLMC_CACHE_DIR": str(cache)}


def link_again(source: Path, linked: Path) -> None:
    """Make a folder of links that of the source's files again, without what was added to it or replaced in it."""
    before, now = inodes(source), inodes(linked)
    for name, _ in now.items() - before.items():
        (linked / name).unlink()
    for name, _ in before.items() - now.items():
        (linked / name).parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # Of a process that writes its entry now.
            os.link(source / name, linked / name)


def inodes(folder: Path) -> dict[str, int]:
    """The files below a folder, and which they are; none where there is no folder."""
    numbers: dict[str, int] = {}
    left = [str(folder)] if folder.is_dir() else []
    while left:
        for entry in os.scandir(left.pop()):
            if entry.is_dir(follow_symlinks=False):
                left.append(entry.path)
            else:
                numbers[os.path.relpath(entry.path, folder)] = entry.inode()
    return numbers


def write(copy: Path, file: Path, source: str) -> None:
    """A file of the copy, compiled anew: by its time, what is of the same second and size would pass for it."""
    (copy / file).write_text(source, encoding="utf-8")
    for compiled in (copy / file).parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()


def asked(file: Path, reach: Reach, key: str, seconds: float) -> list[str]:
    """The tests that may kill a mutant of a file: those that reach it, then others of the file and of its room, since
    it may run at import, or in a process that outlives the test that has started it. The nearest files first, and of
    a file what is quick; those that take `seconds` together."""
    near = [str(path.relative_to(ROOT)) for path in (*own_tests(file, ROOT), *room_tests(file, ROOT))]
    rank = {name: number for number, name in reversed([*enumerate(near)])}
    reaching = reach.tests.get(key) or []
    others = [test for test in reach.seconds if test.partition("::")[0] in rank and test not in {*reaching}]
    tests = [*_nearest(reaching, rank, reach.seconds), *_nearest(others, rank, reach.seconds)]
    spent = [*accumulate(reach.seconds.get(test, 0) for test in tests)]
    return [test for test, until in zip(tests, spent, strict=True) if until <= seconds or test == tests[0]]


def _nearest(tests: Iterable[str], rank: dict[str, int], seconds: dict[str, float]) -> list[str]:
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_file[test.partition("::")[0]].append(test)
    took = {name: sum(seconds.get(test, 0) for test in tests_of_file) for name, tests_of_file in by_file.items()}
    files = sorted(by_file, key=lambda name: (rank.get(name, len(rank)), took[name]))
    return [test for name in files for test in sorted(by_file[name], key=lambda test: seconds.get(test, 0))]


def failure(runner: WarmPytest, copy: Path, tests: list[str], seconds: int) -> str:
    """The first of these tests that fails in the copy, or what else happens; empty if all pass."""
    names = copy / "build" / "asked.txt"
    names.parent.mkdir(exist_ok=True)
    names.write_text("\n".join(tests), encoding="utf-8")
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", str(seconds), f"@{names}"]
    code, output = runner.run(copy, arguments, environment(copy), 20 * seconds)
    if code is None:
        return "out of time"
    if code in (0, 5):
        return ""
    match = re.search(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", output, re.MULTILINE)
    return match[1] if match else f"exit code {code}"


def tried(
    runner: WarmPytest, copy: Path, file: Path, mutant: Mutant, key: str, tests: list[str], seconds: int
) -> Trial:
    """Put the mutant into the copy, run the tests, take it out again. A test that fails without it, too, kills none."""
    source = (ROOT / file).read_text(encoding="utf-8")
    changed = mutant.applied(source)
    broken: list[str] = []
    killed_by = ""
    while left := [test for test in tests if test not in broken]:
        write(copy, file, changed)
        try:
            killed_by = failure(runner, copy, left, seconds)
        finally:
            write(copy, file, source)
        if "::" not in killed_by or not failure(runner, copy, [killed_by], seconds):
            break
        broken.append(killed_by)
        killed_by = ""
    diff = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    return Trial(key, str(file), mutant.line, mutant.kind, "\n".join(list(diff)[3:]), killed_by)


def known_reach(chosen: dict[str, tuple[Path, Mutant]], jobs: int) -> Reach:
    """Which tests reach these mutants; found once for a sample and the tests as they are."""
    tests = [sha256(path.read_bytes()).hexdigest() for path in sorted((ROOT / "tests").rglob("*.py"))]
    kept = WORK / f"reach-{sha256(''.join([*sorted(chosen), *tests]).encode()).hexdigest()[:16]}.json"
    if not kept.exists():
        copy = copy_of_the_tree("probed")
        reach = reach_of(chosen, copy, environment(copy), jobs)
        kept.write_text(json.dumps(asdict(reach)), encoding="utf-8")
    return Reach(**json.loads(kept.read_text(encoding="utf-8")))


def key_of(file: Path, mutant: Mutant) -> str:
    """What a mutant is known by as long as its file is the same."""
    text = f"{file} {mutant} {sha256((ROOT / file).read_bytes()).hexdigest()}"
    return sha256(text.encode()).hexdigest()[:16]


def table(trials: Iterable[Trial]) -> str:
    """Killed and tried, by room; those that nothing can tell are not counted."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for trial in trials:
        if not trial.killed_by and reason_of(trial.file, trial.diff):
            continue
        for room in (room_of(Path(trial.file)), "all"):
            counts[room][0] += bool(trial.killed_by)
            counts[room][1] += 1
    rows = sorted(counts.items(), key=lambda item: (item[0] == "all", item[0]))
    return "\n".join(f"{room:24} {killed:4} of {count:4}  {killed / count:4.0%}" for room, (killed, count) in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="of rooms whose name begins so")
    parser.add_argument("--jobs", type=int, default=1, help="at the same time, each in a copy of its own")
    parser.add_argument("--seconds", type=float, default=200, help="of tests that a mutant meets, as they took before")
    parser.add_argument("--timeout", type=int, default=200, help="seconds of one test")
    parser.add_argument("--survivors", action="store_true", help="try those again that have survived")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    record = WORK / "trials.jsonl"
    known = {t["key"]: Trial(**t) for t in map(json.loads, record.read_text().splitlines())} if record.exists() else {}
    chosen = {key_of(*pair): pair for pair in sample(arguments.count, arguments.seed, arguments.only)}
    reach = known_reach(chosen, arguments.jobs)
    copies: SimpleQueue[tuple[WarmPytest, Path]] = SimpleQueue()

    def attempt(key: str) -> Trial:
        if key in known and not (arguments.survivors and not known[key].killed_by):
            return known[key]
        runner, copy = copies.get()
        try:
            file, mutant = chosen[key]
            tests = asked(file, reach, key, arguments.seconds)
            trial = tried(runner, copy, file, mutant, key, tests, arguments.timeout)
        finally:
            copies.put((runner, copy))
        with record.open("a") as kept:
            kept.write(json.dumps(asdict(trial)) + "\n")
        print(f"{trial.file}:{trial.line} {trial.kind}: {trial.killed_by or 'SURVIVED'}", file=sys.stderr, flush=True)
        return trial

    for number in range(arguments.jobs):
        copies.put((WarmPytest(), copy_of_the_tree(f"tree{number}")))
    with ThreadPoolExecutor(arguments.jobs) as threads:
        trials = list(threads.map(attempt, chosen))
    while not copies.empty():
        copies.get()[0].close()
    if arguments.json:
        json.dump([asdict(trial) for trial in trials], sys.stdout, indent=1)
        return
    for trial in trials:
        if not trial.killed_by:
            reason = reason_of(trial.file, trial.diff)
            print(f"\n{trial.file}:{trial.line} {trial.kind}\n{trial.diff}" + (f"\n    {reason}" if reason else ""))
    print(f"\n{table(trials)}")


if __name__ == "__main__":
    main()
