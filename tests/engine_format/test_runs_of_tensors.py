"""Tensors that lie side by side are copied to a device at once; those far apart, as of a shared file, are not."""

from __future__ import annotations

from pathlib import Path

from llmc.engine_format.weight_file import StoredTensor, runs_of_tensors


def stored(file: str, begin: int, end: int) -> StoredTensor:
    return StoredTensor(Path(file), "U8", (end - begin,), begin, end)


def test_runs_end_where_other_tensors_or_another_file_come_between() -> None:
    first, padded, far, other = stored("a", 64, 100), stored("a", 128, 256), stored("a", 640, 700), stored("b", 64, 70)
    assert runs_of_tensors([far, other, padded, first, first]) == [[first, padded], [far], [other]]


def test_one_file_of_its_own_is_one_run() -> None:
    tensors = [stored("a", 64 * i, 64 * i + 1) for i in range(1, 9)]
    assert runs_of_tensors(tensors) == [tensors]
