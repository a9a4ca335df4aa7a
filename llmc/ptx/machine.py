"""Execute a launch: teams of blocks in order, each until it cannot continue."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.ptx.code import Code, Segment
from llmc.ptx.errors import PtxError
from llmc.ptx.finding import Check, Finding
from llmc.ptx.global_memory import Buffer, Indices
from llmc.ptx.lanes import Bools
from llmc.ptx.launch import Launch
from llmc.ptx.schedule import Strand, Waiting
from llmc.ptx.team import Team

# Number of threads that are executed together, so that their values stay in a processor's cache.
TEAM_THREADS = 8192
# Instructions of one block, after which a launch counts as endless: those that threads, or several blocks, execute
# together count once.
INSTRUCTION_LIMIT = 10_000_000
# Instructions after which another team has its turn: this one may be waiting for something that it stores.
_TURN = 100_000
_MOST_NAMED = 6


@dataclass(frozen=True)
class Report:
    """The result of a launch. findings: what the checks have found. counts: how many threads had each. instructions:
    executed by teams."""

    findings: tuple[Finding, ...]
    counts: tuple[int, ...]
    instructions: int


def execute(
    code: Code,
    grid: tuple[int, int, int],
    arguments: Sequence[bytes],
    buffers: Sequence[Buffer],
    *,
    outputs: Sequence[Buffer] = (),
    may_begin_early: bool = False,
    limit: int = INSTRUCTION_LIMIT,
) -> Report:
    """Execute a kernel and check it; buffers are changed in place.

    Args:
        code: the kernel.
        grid: blocks in each direction.
        arguments: the bytes of each parameter, in order.
        buffers: all memory that the launch may touch.
        outputs: those of the buffers that have to be written as a whole when it has ended.
        may_begin_early: whether the launch may begin before earlier ones end, as with programmatic dependent launch.
        limit: instructions of a block, after which an error says where it was.

    Raises:
        PtxError: threads wait for each other forever, or the limit is reached; the error says where.
    """
    plan = code.plan
    launch = Launch(plan, grid, arguments, buffers, may_begin_early)
    count = int(np.prod(grid))
    rows = max(1, TEAM_THREADS // plan.threads)
    queue = deque[Team | range](range(first, min(first + rows, count)) for first in range(0, count, rows))
    executed = 0
    with np.errstate(all="ignore"):
        while queue:
            blocks = queue.popleft()
            team = Team(launch, np.arange(blocks.start, blocks.stop)) if isinstance(blocks, range) else blocks
            before = team.executed
            queue.extend(_run(team, code, limit))
            executed += team.executed - before
    for output in outputs:
        _check_output(launch, output)
    findings = launch.findings.all()
    return Report(findings, tuple(launch.findings.count(finding) for finding in findings), executed)


def _check_output(launch: Launch, output: Buffer) -> None:
    if output.written is not None and not output.written.all():
        missing = np.flatnonzero(output.written == 0)
        detail = f"{len(missing)} bytes of {output.name}, the first of them byte {int(missing[0])}"
        launch.findings.add_to_launch(Check.OUTPUT, detail)


def _run(team: Team, code: Code, limit: int) -> list[Team]:
    """Execute a team for one turn. Returns what is left of it: itself, or the teams that it was divided into."""
    end = team.executed + _TURN
    while (strand := team.schedule.next()) is not None or team.retry():
        if strand is None:
            continue
        segment = code.segments[strand.place]
        _execute(team, strand, segment, code.plan.has_wgmma)
        team.executed += segment.count
        if team.executed > limit:
            raise _endless(team, strand, segment, limit)
        if team.leaving is not None:
            leaving = team.leaving
            return [team.take(rows) for rows in (np.flatnonzero(leaving), _others(team, leaving)) if len(rows)]
        if team.executed > end and team.schedule.running:
            return [team]
    waiting = list(team.waiting())
    if waiting:
        raise _deadlock(team, waiting)
    return []


def _others(team: Team, leaving: Bools) -> Indices:
    """The rows that stay and have live threads."""
    return np.flatnonzero(~leaving & team.schedule.living().any(axis=1))


def _execute(team: Team, strand: Strand, segment: Segment, watches: bool) -> None:
    mask = strand.mask
    if watches:
        for step in segment.steps:
            if step.touched:
                team.warpgroups.touch(step.touched, step.copied, mask, step.at)
            step.run(team, mask)
    else:
        for step in segment.steps:
            step.run(team, mask)
    segment.end(team, strand)


def _endless(team: Team, strand: Strand, segment: Segment, limit: int) -> PtxError:
    plan, at = team.launch.plan, segment.last
    row = int(np.flatnonzero(team.whole(strand.mask).any(axis=1))[0])
    source = "" if at.source is None else f", {at.source}"
    return PtxError(
        f"{plan.kernel.name} does not end: block {int(team.numbers[row])} has executed {limit} instructions"
        f"{_found_before(team)}",
        at=f"{plan.module}:{at.line} ({at.opcode}){source}",
        fix="see what the loop there waits for; raise LLMC_PTX_INSTRUCTIONS if it needs that many",
    )


def _found_before(team: Team) -> str:
    """The first fault that the checks have found, which may be why a launch does not end."""
    findings = team.launch.findings.all()
    return f"; before that, {findings[0]}" if findings else ""


def _deadlock(team: Team, waiting: Sequence[Waiting]) -> PtxError:
    """The error with the waiting threads of the first block that is stuck."""
    plan, row = team.launch.plan, waiting[0].row
    ours = [waiter for waiter in waiting if waiter.row == row]
    lines = [
        f"threads {w.threads[0]} to {w.threads[-1]} at line {w.at.line} ({w.at.opcode}) for {w.what}"
        for w in ours[:_MOST_NAMED]
    ]
    returned = int((~team.schedule.living()[row]).sum())
    lines += [f"{returned} threads have returned"] if returned else []
    first = ours[0].at
    source = "" if first.source is None else f", {first.source}"
    return PtxError(
        f"{plan.kernel.name} waits forever in block {int(team.numbers[row])}: {'; '.join(lines)}{_found_before(team)}",
        at=f"{plan.module}:{first.line}{source}",
        fix="let the expected number of threads, or bytes, arrive in the phase that is waited for",
    )
