"""What is noted on a request has one writer each: found in the source, wherever a record is reached."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import llmc
from llmc.runtime.requests.request_state import Decoding, KnownPrefix, KnownStates, Standing

PACKAGE = Path(llmc.__file__).parent
OWNERS = {"standing": ("scheduler.py", Standing), "decoding": ("decode_set.py", Decoding)}
OWNERS |= {"prefix": ("prefix_cache.py", KnownPrefix), "states": ("state_snapshots.py", KnownStates)}
# Who keeps the queues says what is in them, and who gives blocks whose they are.
OTHER_OWNERS = {"is_waiting": "waiting_requests.py"}
OTHER_OWNERS |= dict.fromkeys(("blocks", "groups", "reading"), "request_blocks.py")
# A request that comes back from the second tier continues where it was preempted, and a part of a second reading begins
# where the last one did.
FURTHER_OWNERS = {"computed": ("second_tier.py", "request_blocks.py"), "reading": ("second_tier.py",)}
MUTATORS = {"append", "extend", "pop", "clear", "insert", "remove", "sort"}


def written_fields(source: str, record: str) -> Iterator[tuple[int, str]]:
    """(line, field) of each assignment to a field of `x.record`, also by another name, and of each change of it."""
    tree = ast.parse(source)
    aliases = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target, value in _pairs(node)
        if isinstance(name := target, ast.Name) and isinstance(value, ast.Attribute) and value.attr == record
    }

    def field_of(node: ast.expr) -> str | None:
        if not isinstance(node, ast.Attribute):
            return None
        owner = node.value
        is_record = (isinstance(owner, ast.Attribute) and owner.attr == record) or (
            isinstance(owner, ast.Name) and owner.id in aliases
        )
        return node.attr if is_record else None

    for node in ast.walk(tree):
        written: ast.expr | None = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            written = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            written = node.func.value
        if written is not None and (field := field_of(written)):
            yield written.lineno, field


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


@pytest.mark.parametrize("record", OWNERS)
def test_one_file_writes_a_record(record: str) -> None:
    owner, kind = OWNERS[record]
    written: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for _, name in written_fields(source, record) if record in source else ():
            written.setdefault(name, set()).add(path.name)
    owners = {field.name: {OTHER_OWNERS.get(field.name, owner)} for field in fields(kind)}
    for name, further in FURTHER_OWNERS.items():
        if name in owners:
            owners[name].update(further)
    assert written == owners


def test_another_writer_would_be_found() -> None:
    source = "def f(r):\n    own, n = r.standing, 1\n    own.computed = n\n    r.standing.blocks.append(n)\n"
    assert list(written_fields(source, "standing")) == [(3, "computed"), (4, "blocks")]
