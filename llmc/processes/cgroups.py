"""The limits of Linux control groups for this process: processor time and memory, in versions 1 and 2.

A container is such a group. Limits of the groups around it hold as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")
# Version 1 writes a number near 2**63 for no limit.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Mount:
    """A hierarchy of groups. root: the group at the mount's place. controllers: the controllers of version 1; empty for
    version 2."""

    place: Path
    root: str
    controllers: frozenset[str]


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes: the smallest limit of any enclosing group, and the smallest remaining amount."""

    most: int
    left: int


def processor_quota(groups: Path = _GROUPS, mounts: Path = _MOUNTS) -> float | None:
    """Processors' worth of time that the groups grant; None without a limit.

    groups, mounts: what Linux has in /proc.
    """
    quotas: list[float] = []
    for directory, is_new in _directories("cpu", groups, mounts):
        if is_new:
            quota, _, period = _text(directory / "cpu.max").partition(" ")
        else:
            quota, period = _text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(groups: Path = _GROUPS, mounts: Path = _MOUNTS) -> MemoryLimit | None:
    """Return the memory limit; None without one. Pages of files that can be dropped count as free."""
    limits: list[MemoryLimit] = []
    for directory, is_new in _directories("memory", groups, mounts):
        names = ("memory.max", "memory.current") if is_new else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        most, used = (_text(directory / name) for name in names)
        if most.isdigit() and used.isdigit() and int(most) < _NO_LIMIT:
            droppable = _statistic(directory, "inactive_file" if is_new else "total_inactive_file")
            limits.append(MemoryLimit(int(most), max(0, int(most) - int(used) + droppable)))
    if not limits:
        return None
    return MemoryLimit(min(limit.most for limit in limits), min(limit.left for limit in limits))


def _directories(controller: str, groups: Path, mounts: Path) -> Iterator[tuple[Path, bool]]:
    """The process's groups, from its own outwards, and whether they are of version 2."""
    hierarchies = _mounts(mounts)
    for line in _text(groups).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        is_new, listed = controllers == "", set(controllers.split(","))
        for mount in hierarchies:
            is_its = not mount.controllers if is_new else controller in listed & mount.controllers
            if is_its:
                yield from ((directory, is_new) for directory in _outwards(mount, path))


def _outwards(mount: Mount, path: str) -> Iterator[Path]:
    """The group of a path and those around it; only the mount's own if the path is not visible there."""
    inside = path.removeprefix(mount.root) if mount.root != "/" else path
    directory = mount.place / inside.strip("/")
    if ".." in directory.parts or not directory.is_dir():
        directory = mount.place
    yield directory
    while directory != mount.place:
        directory = directory.parent
        yield directory


def _mounts(path: Path) -> Sequence[Mount]:
    mounts = []
    for line in _text(path).splitlines():
        before, _, after = line.partition(" - ")
        places, kinds = before.split(), after.split()
        if len(places) > 4 and len(kinds) > 2 and kinds[0] in ("cgroup", "cgroup2"):
            controllers = frozenset(kinds[2].split(",")) if kinds[0] == "cgroup" else frozenset[str]()
            mounts.append(Mount(Path(places[4]), places[3], controllers))
    return mounts


def _statistic(directory: Path, name: str) -> int:
    for line in _text(directory / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    """Empty for a file that cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
