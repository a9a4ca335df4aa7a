"""How many of a seeded sample of mutants the tests of their rooms kill.

    make mutants                      # 200 of them; hours of a core
    python -m tests.mutation --count 60 --only runtime
    python -m tests.mutation --survivors

Each is tried in a copy of the working tree, against the tests that have its file's name or import it, then against the
others of its room, until one fails. What has been tried is kept in build/mutants, and not tried again.
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
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.mutate import Mutant, mutants
from tests.mutation.rooms import own_tests, room_of, room_tests

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
    for room, found in sorted(rooms.items()):
        share = max(1, round(count * weights[room] / sum(weights.values())))
        kinds: dict[str, list[tuple[Path, Mutant]]] = defaultdict(list)
        for each in found:
            kinds[each[1].kind].append(each)
        dice = random.Random(f"{seed} {room}")
        names = sorted(kinds)
        for number in range(share):
            chosen.append(dice.choice(kinds[names[number % len(names)]]))
    random.Random(seed).shuffle(chosen)
    return [each for each in chosen if only is None or room_of(each[0]).startswith(only)]


@cache
def candidates() -> dict[str, list[tuple[Path, Mutant]]]:
    """All mutants by room."""
    rooms: dict[str, list[tuple[Path, Mutant]]] = defaultdict(list)
    for path in sorted({*(ROOT / "llmc").rglob("*.py")} - {*ON_DEVICES}):
        file = path.relative_to(ROOT)
        rooms[room_of(file)] += [(file, mutant) for mutant in mutants(path.read_text(encoding="utf-8"))]
    return {room: found for room, found in rooms.items() if found}


def copy_of_the_tree(number: int) -> Path:
    """The working tree as it is, in a folder of its own, with a cache that starts with this machine's kernels."""
    copy = WORK / f"tree{number}"
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
    """Python finds the copy's llmc first, and its cache holds nothing that a mutant has made before."""
    from llmc.cache import CacheKind, open_cache

    cache = copy / "build" / "cache"
    cache.mkdir(parents=True, mode=0o700, exist_ok=True)
    kept = ("kernels", "triton")
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
        os.link(source / name, linked / name)


def inodes(folder: Path) -> dict[str, int]:
    """The files below a folder, and which they are; none where there is no folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_ino for path in paths}


def write(copy: Path, file: Path, source: str) -> None:
    """A file of the copy, compiled anew: by its time, what is of the same second and size would pass for it."""
    (copy / file).write_text(source, encoding="utf-8")
    for compiled in (copy / file).parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()


def killer(copy: Path, stages: Iterable[list[Path]], seconds: int, without: Iterable[str] = ()) -> str:
    """The first test that fails in the copy, or that it took too long; empty if all pass. without: tests left out."""
    for files in stages:
        if not files:
            continue
        named = [str(path.relative_to(ROOT)) for path in files]
        failed = failure(copy, [*named, *(f"--deselect={test}" for test in without)], seconds)
        if failed:
            return failed
    return ""


def failure(copy: Path, arguments: list[str], seconds: int) -> str:
    """The first test that fails in the copy, of those that pytest is asked for."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", str(seconds)]
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=copy,
            env=environment(copy),
            capture_output=True,
            text=True,
            timeout=3 * seconds,
        )
    except subprocess.TimeoutExpired:
        return "out of time"
    if done.returncode in (0, 5):
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found[1] if found else f"exit code {done.returncode}"


def tried(file: Path, mutant: Mutant, key: str, copy: Path, seconds: int) -> Trial:
    """Put the mutant into the copy, run the tests, take it out again. A test that fails without it, too, kills none."""
    source = (ROOT / file).read_text(encoding="utf-8")
    changed = mutant.applied(source)
    first = own_tests(file, ROOT)
    rest = [path for path in room_tests(file, ROOT) if path not in first]
    broken: list[str] = []
    while True:
        write(copy, file, changed)
        try:
            killed_by = killer(copy, (first, rest), seconds, broken)
        finally:
            write(copy, file, source)
        if "::" not in killed_by or not failure(copy, [killed_by], seconds):
            break
        broken.append(killed_by)
    diff = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    return Trial(key, str(file), mutant.line, mutant.kind, "\n".join(list(diff)[3:]), killed_by)


def key_of(file: Path, mutant: Mutant) -> str:
    """What a mutant is known by as long as its file is the same."""
    text = f"{file} {mutant} {sha256((ROOT / file).read_bytes()).hexdigest()}"
    return sha256(text.encode()).hexdigest()[:16]


def table(trials: Iterable[Trial]) -> str:
    """Killed and tried, by room."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for trial in trials:
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
    parser.add_argument("--timeout", type=int, default=600, help="seconds of a test, a third of a stage's")
    parser.add_argument("--survivors", action="store_true", help="try those again that have survived")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    record = WORK / "trials.jsonl"
    known = {t["key"]: Trial(**t) for t in map(json.loads, record.read_text().splitlines())} if record.exists() else {}
    chosen = {key_of(*each): each for each in sample(arguments.count, arguments.seed, arguments.only)}
    copies: SimpleQueue[Path] = SimpleQueue()

    def attempt(key: str) -> Trial:
        if key in known and not (arguments.survivors and not known[key].killed_by):
            return known[key]
        copy = copies.get()
        try:
            trial = tried(*chosen[key], key, copy, arguments.timeout)
        finally:
            copies.put(copy)
        with record.open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
        print(f"{trial.file}:{trial.line} {trial.kind}: {trial.killed_by or 'SURVIVED'}", file=sys.stderr, flush=True)
        return trial

    for number in range(arguments.jobs):
        copies.put(copy_of_the_tree(number))
    with ThreadPoolExecutor(arguments.jobs) as threads:
        trials = list(threads.map(attempt, chosen))
    if arguments.json:
        json.dump([asdict(trial) for trial in trials], sys.stdout, indent=1)
        return
    for trial in trials:
        if not trial.killed_by:
            print(f"\n{trial.file}:{trial.line} {trial.kind}\n{trial.diff}")
    print(f"\n{table(trials)}")


if __name__ == "__main__":
    main()
