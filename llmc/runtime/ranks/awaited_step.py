"""Wait on the first rank until the last stage has the result of a step."""

from pathlib import Path

from llmc.runtime.ranks.team import Member, Team
from llmc.settings import settings

_LOOK_SECONDS = 0.25


def await_step(team: Team, number: int) -> None:
    """Wait for the result of a step.

    Args:
        team: The other ranks.
        number: The step's number.

    Raises:
        RankError: A rank is lost or stopped. A rank whose process takes CPU time is not stopped: one that waits for a
            kernel does so too.
    """
    taking, is_there = team.rows.taking, False
    assert taking is not None, "the first rank of several stages takes the result"
    still, before = 0, (0, 0)
    while not is_there:
        try:
            is_there = taking.take(number, _LOOK_SECONDS)
        except TimeoutError:
            member = team.behind(number)
            now = (0, 0) if member is None else (member.rank, _processor_ticks(member))
            still, before = (still + 1 if now == before else 0), now
            if member is not None and still * _LOOK_SECONDS >= settings().rank_stall_seconds:
                team.lose(member, f"has kept the others waiting for {still * _LOOK_SECONDS:g} s")
        else:
            if not is_there:
                team.fail()
        team.check()


def _processor_ticks(member: Member) -> int:
    """The CPU time of a rank's process, which tells a slow rank from a stuck one."""
    if member.process is None:
        return 0
    try:
        text = Path(f"/proc/{member.process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # After the name in parentheses; user and system time are the 14th and 15th of all.
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
