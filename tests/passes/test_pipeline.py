"""The order of the passes: nothing that is a pass is forgotten in it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import llmc.passes
from llmc.passes.pipeline import built_in
from llmc.passes.rewrite import GraphPass, Pass, Rewrite, WeightPass


def written_passes() -> Iterator[Pass]:
    for file in pkgutil.walk_packages(llmc.passes.__path__, "llmc.passes."):
        for value in vars(importlib.import_module(file.name)).values():
            members = value if isinstance(value, tuple) else (value,)
            yield from (item for item in members if isinstance(item, Rewrite | GraphPass | WeightPass))


def test_every_pass_has_its_place() -> None:
    placed = [pass_.name for pass_ in built_in()]
    assert {pass_.name for pass_ in written_passes()} - set(placed) == set()
    assert len(placed) == len(set(placed)) > 30
