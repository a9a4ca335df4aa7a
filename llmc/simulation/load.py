"""When requests arrive, how long their prompts are and how much they generate: from a file, or drawn from a seed."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.bench.prompts import PromptShape
from llmc.errors import OptionError

_FIX = 'a line for each request: {"arrival": seconds, "prompt_tokens": 512, "output_tokens": 128}'


@dataclass(frozen=True, order=True)
class Arrival:
    """A request that comes `arrival` seconds after the first moment."""

    arrival: float
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and output together."""
        return self.prompt_tokens + self.output_tokens


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """Requests in order of arrival, from lines of JSON or from the output of `llmc bench serve --json`.

    Raises OptionError with the line that cannot be parsed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the trace cannot be read: {error}", at=path, fix=_FIX) from None
    arrivals = _bench_requests(text, path)
    if arrivals is None:
        lines = ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
        arrivals = [_arrival(_parsed(line, f"{path}:{number}"), f"{path}:{number}") for number, line in lines]
    if not arrivals:
        raise OptionError("the trace has no requests", at=path, fix=_FIX)
    return tuple(sorted(arrivals))


def drawn_load(shape: PromptShape, count: int, rate: float | None, seed: int) -> tuple[Arrival, ...]:
    """`count` requests of a shape, at random times of a rate a second on average (a Poisson process); all at once
    without a rate. The same seed gives the same ones. Raises OptionError for a rate that is not positive."""
    if rate is not None and not rate > 0:
        raise OptionError(f"the rate cannot be {rate}", at="--request-rate", fix="give more than 0")
    generator, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        lengths = (_drawn(length, shape.range_ratio, generator) for length in (shape.input_len, shape.output_len))
        prompt, output = lengths
        arrivals.append(Arrival(now, shape.prefix_len + prompt, output))
        now += 0.0 if rate is None else generator.expovariate(rate)
    return tuple(arrivals)


def longest(load: Sequence[Arrival]) -> int:
    """Return the number of tokens of the longest request."""
    return max(arrival.tokens for arrival in load)


def _drawn(length: int, ratio: float, generator: random.Random) -> int:
    return max(1, round(length * generator.uniform(1 - ratio, 1 + ratio))) if ratio else length


def _bench_requests(text: str, path: Path) -> list[Arrival] | None:
    """The requests of a benchmark's record; None if the text is not one."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("requests"), list):
        return None
    return [_arrival(entry, f"{path}: requests[{index}]") for index, entry in enumerate(record["requests"])]


def _parsed(line: str, at: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise OptionError(f"the trace has a line that is not JSON: {error}", at=at, fix=_FIX) from None


def _arrival(entry: Any, at: str) -> Arrival:
    if not isinstance(entry, dict):
        raise OptionError(f"a request is {entry!r:.60} and no object", at=at, fix=_FIX)
    arrival: Any = entry.get("arrival")
    is_number = isinstance(arrival, int | float) and not isinstance(arrival, bool)
    if not is_number or not math.isfinite(arrival) or arrival < 0:
        raise OptionError(f"arrival is {arrival!r:.60}, not seconds from 0 on", at=at, fix=_FIX)
    return Arrival(float(arrival), *(_count(entry, name, at) for name in ("prompt_tokens", "output_tokens")))


def _count(entry: dict[str, Any], name: str, at: str) -> int:
    count = entry.get(name)
    if type(count) is not int or count < 1:
        raise OptionError(f"{name} is {count!r:.60}, not a whole number from 1 on", at=at, fix=_FIX)
    return count
