"""Limits of containers, in both versions of control groups, around a process that is in one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmc.processes import processors
from llmc.processes.cgroups import MemoryLimit, memory_limit, processor_quota


class Groups:
    """Groups in a directory, in the place of Linux's own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.groups, self.mounts = root / "cgroup", root / "mountinfo"
        self.groups.write_text("")
        self.mounts.write_text("25 1 0:22 / /proc rw - proc proc rw\n")

    def mount(self, name: str, kind: str, options: str, root: str = "/") -> Path:
        place = self._root / name
        place.mkdir()
        with self.mounts.open("a") as file:
            file.write(f"31 23 0:28 {root} {place} rw,relatime shared:9 - {kind} {kind} {options}\n")
        return place

    def put(self, line: str) -> None:
        with self.groups.open("a") as file:
            file.write(f"{line}\n")

    def quota(self) -> float | None:
        return processor_quota(self.groups, self.mounts)

    def memory(self) -> MemoryLimit | None:
        return memory_limit(self.groups, self.mounts)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def files(directory: Path, **texts: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name.replace("__", ".")).write_text(f"{text}\n")


def test_no_groups_limit_nothing(groups: Groups) -> None:
    assert groups.quota() is None and groups.memory() is None
    groups.put("0::/gone")
    groups.mount("unified", "cgroup2", "rw")
    assert groups.quota() is None and groups.memory() is None


def test_version_2_with_limits_around_it(groups: Groups) -> None:
    top = groups.mount("unified", "cgroup2", "rw")
    groups.put("0::/outer/inner")
    files(top / "outer", cpu__max="150000 100000", memory__max="1000", memory__current="400")
    files(top / "outer" / "inner", cpu__max="max 100000", memory__max="900", memory__current="100")
    files(top / "outer", memory__stat="anon 7\ninactive_file 50")
    assert groups.quota() == 1.5
    assert groups.memory() == MemoryLimit(900, 650)


def test_version_1(groups: Groups) -> None:
    cpu = groups.mount("cpu", "cgroup", "rw,cpu,cpuacct")
    memory = groups.mount("memory", "cgroup", "rw,memory")
    groups.put("4:memory:/box")
    groups.put("3:cpu,cpuacct:/box")
    files(cpu, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    files(cpu / "box", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    files(memory, memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="5")
    files(memory / "box", memory__limit_in_bytes="800", memory__usage_in_bytes="700")
    files(memory / "box", memory__stat="inactive_file 1\ntotal_inactive_file 300")
    assert groups.quota() == 0.5
    assert groups.memory() == MemoryLimit(800, 400)


def test_a_container_sees_its_own_group_at_the_mount(groups: Groups) -> None:
    """Docker mounts the container's group where the whole hierarchy was, and leaves its path as it is outside."""
    cpu = groups.mount("cpu", "cgroup", "rw,cpu", root="/docker/abc")
    groups.put("3:cpu:/docker/abc")
    files(cpu, cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert groups.quota() == 2
    groups.groups.write_text("3:cpu:/../elsewhere\n")
    assert groups.quota() == 2


def test_a_quota_bounds_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    here = len(os.sched_getaffinity(0))
    for quota, expected in ((None, here), (0.5, 1), (1.9, 1), (here + 7.0, here)):
        monkeypatch.setattr(processors, "processor_quota", lambda quota=quota: quota)
        assert processors.usable_processors() == expected
