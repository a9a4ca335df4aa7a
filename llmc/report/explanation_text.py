"""The output of `llmc explain`. Each line is readable without the others, because users filter it with grep."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from llmc.errors import LlmcError
from llmc.graph.pass_record import PassRecord, RefusalRecord, RewriteRecord
from llmc.report.coverage.coverage import Coverage
from llmc.report.explanation import Explanation, NodeHistory
from llmc.report.placements.text import placement_lines

# More rewrites than this at one source line are shown as a count; --pass shows each.
_SHOWN_NODES = 6


@dataclass(frozen=True)
class Line:
    """A line of an explanation. style: as rich names it, for consoles."""

    text: str
    style: str = ""


def overview_lines(name: str, explanation: Explanation) -> Iterator[Line]:
    """The error that ended the passes, if any; coverage; the rewrites of each pass by source line; then near-misses,
    where those of one pass at one source line are merged over layers."""
    if explanation.error is not None:
        yield from _error(name, explanation.error)
    yield Line(f"coverage of {name}", "bold")
    for rule_coverage in explanation.coverage:
        yield from _coverage(rule_coverage)
    if not explanation.coverage:
        yield Line("  nothing was found that a pass could cover")
    yield Line("")
    yield from _rewritten(explanation)
    if explanation.ranks is not None:
        yield Line("")
        yield from (Line(text, style) for style, text in placement_lines(explanation.ranks))
    alike: dict[tuple[str, str], list[RefusalRecord]] = {}
    for record in explanation.passes:
        for refusal in record.refusals:
            # Nodes without a source line belong to no layer, so each is shown.
            alike.setdefault((record.name, refusal.source or refusal.node), []).append(refusal)
    yield Line("")
    yield Line(f"near-misses: {sum(map(len, alike.values()))}", "bold")
    for (pass_name, _), refusals in alike.items():
        yield from refusal_lines(pass_name, refusals[0])
        if len(refusals) > 1:
            yield Line(f"      and {len(refusals) - 1} more at this line: --pass {pass_name} shows each")


def pass_lines(record: PassRecord) -> Iterator[Line]:
    """Yield every rewrite of a pass under the source line it is about, and every near-miss."""
    count = len(record.rewrites)
    yield Line(
        f"{record.name} ({record.numerics}): {_rewrites(count)}, "
        f"{len(record.refusals)} refused, {record.nodes_before} → {record.nodes_after} nodes",
        "bold",
    )
    for source, group in groupby(record.rewrites, key=lambda r: r.source):
        yield Line(f"  {source or 'no line of the model'}")
        for rewrite in group:
            yield Line(f"    {_rewrite(rewrite)}")
    for refusal in record.refusals:
        yield from refusal_lines(record.name, refusal)


def history_lines(name: str, history: NodeHistory) -> Iterator[Line]:
    """Yield the origin of a node, what replaced it, and what was refused because of it."""
    yield Line(name, "bold")
    if history.made is not None:
        yield Line(f"  made by {history.made[0]} {_rewrite(history.made[1])}")
        yield from _source(history.made[1].source)
    else:
        yield Line("  is of the captured graph")
    for pass_name, rewrite in history.used:
        yield Line(f"  rewritten by {pass_name} {_rewrite(rewrite)}")
        yield from _source(rewrite.source)
    for pass_name, refusal in history.refused:
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


def _rewritten(explanation: Explanation) -> Iterator[Line]:
    """Yield a line per pass, or a single count if an error follows, so that the error stays on the screen."""
    yield Line("what the passes rewrote", "bold")
    if explanation.error is not None:
        count = sum(len(record.rewrites) for record in explanation.passes)
        yield Line(f"  {_rewrites(count)} until then: --pass NAME shows those of one pass")
        return
    for record in explanation.passes:
        if record.rewrites:
            count = len(record.rewrites)
            numbers = f"#{record.rewrites[0].number}" + (f"–{record.rewrites[-1].number}" if count > 1 else "")
            yield Line(f"  {record.name}: {_rewrites(count)}, {numbers} ({record.numerics})")


def _error(name: str, error: LlmcError) -> Iterator[Line]:
    yield Line(f"{name} is refused", "bold")
    for line in str(error).splitlines():
        yield Line(f"  {line}", "red")
    yield Line("")


def _coverage(coverage: Coverage) -> Iterator[Line]:
    yield Line(f"  {'✗' if coverage.short else '✓'} {coverage}", "yellow" if coverage.short else "green")
    # Leftovers of one source line are merged over layers, whose reasons differ in node names only. Leftovers without a
    # source line are not merged.
    for _, group in groupby(coverage.left, key=lambda left: left.source or coverage.reasons(left)):
        left = list(group)
        reasons = coverage.reasons(left[0])
        alike = [other for other in left if coverage.reasons(other) == reasons]
        names = ", ".join(other.node for other in alike[:_SHOWN_NODES]) + (" …" if len(alike) > _SHOWN_NODES else "")
        yield Line(f"      {names} ({left[0].op} → {left[0].type}): {'; '.join(reasons)}")
        yield from _source(left[0].source)
        if len(left) > len(alike):
            yield Line(f"      and {len(left) - len(alike)} more at this line")


def _source(source: str | None) -> Iterator[Line]:
    if source is not None:
        yield Line(f"      line      {source}")


def _rewrite(rewrite: RewriteRecord) -> str:
    nodes = rewrite.made[:_SHOWN_NODES]
    arrow = f" → {', '.join(nodes)}{' …' if len(rewrite.made) > len(nodes) else ''}" if nodes else ""
    return f"#{rewrite.number} {rewrite.description}{arrow}"


def _rewrites(count: int) -> str:
    return f"{count} rewrite{'' if count == 1 else 's'}"
