"""What `llmc explain` says, line by line: they are read with grep as often as by eye."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from llmc.debug.coverage import Coverage
from llmc.debug.explain import Explanation, NodeHistory
from llmc.debug.placement_text import placement_lines
from llmc.graph.pass_record import PassRecord, RefusalRecord, RewriteRecord

# More rewrites than this at one source line are shown as a count; --pass shows each.
_SHOWN_NODES = 6


@dataclass(frozen=True)
class Line:
    """style: as rich names it, for consoles."""

    text: str
    style: str = ""


def overview_lines(name: str, explanation: Explanation) -> Iterator[Line]:
    """Coverage, then what each pass rewrote, by source line, then every near-miss."""
    yield Line(f"coverage of {name}", "bold")
    for each in explanation.coverage:
        yield from _coverage(each)
    if not explanation.coverage:
        yield Line("  nothing was found that a pass could cover")
    yield Line("")
    yield Line("what the passes rewrote", "bold")
    for record in explanation.passes:
        if record.rewrites:
            count = len(record.rewrites)
            numbers = (
                f"#{record.rewrites[0].number}–{record.rewrites[-1].number}"
                if count > 1
                else f"#{record.rewrites[0].number}"
            )
            yield Line(f"  {record.name}: {count} {_plural(count, 'rewrite')}, {numbers} ({record.numerics})")
    if explanation.ranks is not None:
        yield Line("")
        for style, text in placement_lines(
            explanation.ranks.placements, explanation.ranks.stages, explanation.ranks.plan
        ):
            yield Line(text, style)
    refused = [(record, refusal) for record in explanation.passes for refusal in record.refusals]
    yield Line("")
    yield Line(f"near-misses: {len(refused)}", "bold")
    for record, refusal in refused:
        yield from refusal_lines(record.name, refusal)


def pass_lines(record: PassRecord) -> Iterator[Line]:
    """Every rewrite of a pass under the source line it is about, and every near-miss."""
    count = len(record.rewrites)
    yield Line(
        f"{record.name} ({record.numerics}): {count} {_plural(count, 'rewrite')}, "
        f"{len(record.refusals)} refused, {record.nodes_before} → {record.nodes_after} nodes",
        "bold",
    )
    for source, group in groupby(record.rewrites, key=lambda r: r.source):
        yield Line(f"  {source or 'no line of the model'}")
        for rewrite in group:
            yield Line(f"    {_rewrite(rewrite)}")
    for refusal in record.refusals:
        yield from refusal_lines(record.name, refusal)


def history_lines(name: str, found: NodeHistory) -> Iterator[Line]:
    """Where a node comes from, what became of it, what was refused because of it."""
    yield Line(name, "bold")
    if found.made is not None:
        yield Line(f"  made by {found.made[0]} {_rewrite(found.made[1])}")
        yield from _source(found.made[1].source)
    else:
        yield Line("  is of the captured graph")
    for pass_name, rewrite in found.used:
        yield Line(f"  rewritten by {pass_name} {_rewrite(rewrite)}")
        yield from _source(rewrite.source)
    for pass_name, refusal in found.refused:
        yield from refusal_lines(pass_name, refusal)


def refusal_lines(pass_name: str, refusal: RefusalRecord) -> Iterator[Line]:
    """A near-miss with everything that is known of it."""
    yield Line(f"  ✗ {pass_name} left {refusal.node} alone: {refusal.reason}", "yellow")
    if refusal.expected is not None:
        yield Line(f"      expected  {refusal.expected}")
    if refusal.found is not None:
        yield Line(f"      found     {refusal.found}")
    operands = ", ".join(f"{o.name}: {o.type}" for o in refusal.operands)
    yield Line(f"      node      {refusal.node}: {refusal.type} = {refusal.op}({operands})")
    for user in refusal.users:
        mark = "  ← in the way" if user.name in refusal.extra_users else ""
        source = f"  {user.source}" if mark and user.source else ""
        yield Line(f"      used by   {user.name}: {user.type} = {user.op}{mark}{source}")
    yield from _source(refusal.source)


def _coverage(each: Coverage) -> Iterator[Line]:
    yield Line(f"  {'✗' if each.short else '✓'} {each}", "yellow" if each.short else "green")
    for (source, reasons), group in groupby(each.left, key=lambda left: (left.source, each.reasons(left))):
        nodes = list(group)
        names = ", ".join(left.node for left in nodes[:_SHOWN_NODES]) + (" …" if len(nodes) > _SHOWN_NODES else "")
        yield Line(f"      {names} ({nodes[0].op} → {nodes[0].type}): {'; '.join(reasons)}")
        yield from _source(source)


def _source(source: str | None) -> Iterator[Line]:
    if source is not None:
        yield Line(f"      line      {source}")


def _rewrite(rewrite: RewriteRecord) -> str:
    made = rewrite.made[:_SHOWN_NODES]
    arrow = f" → {', '.join(made)}{' …' if len(rewrite.made) > len(made) else ''}" if made else ""
    return f"#{rewrite.number} {rewrite.description}{arrow}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
