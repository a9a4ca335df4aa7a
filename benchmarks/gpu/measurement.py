"""One measurement of one contestant as a line of JSON, printed at once: a time limit loses no earlier one."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass

MARK = "measurement "


@dataclass(frozen=True)
class Measurement:
    """seconds: of each round. bytes, flops: the fewest that the case must move and do; 0 where none is counted."""

    group: str
    case: str
    contestant: str
    seconds: tuple[float, ...]
    bytes: float = 0.0
    flops: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def report(measurement: Measurement) -> None:
    """Print it for the suite."""
    print(MARK + json.dumps(asdict(measurement)), flush=True)


def parse(line: str) -> Measurement | None:
    """The measurement of a line that `report` printed; None for other lines."""
    if not line.startswith(MARK):
        return None
    fields = json.loads(line.removeprefix(MARK))
    return Measurement(**{**fields, "seconds": tuple(fields["seconds"])})
