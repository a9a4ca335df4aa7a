"""Rates of this machine's CPU that several simulations share: what one has measured, others read from a file.

The speed of a machine varies, so that simulations with fresh measurements would differ by more than the compared
effect.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from llmc.engine_format.path_argument import path_argument
from llmc.errors import EngineFormatError, OptionError
from llmc.files.typed_json import from_json, to_json
from llmc.plural import counted
from llmc.prediction.launch_cost import kind_of
from llmc.prediction.rates import Rates
from llmc.program import Program


@dataclass(frozen=True)
class RecordedRates:
    """Rates of a machine in a file. target: its name. threads: that were measured together."""

    target: str
    threads: int
    rates: Rates


def rates_on_record(
    path: Path, target: str, threads: int, program: Program, measure: Callable[[Program], Rates]
) -> Rates:
    """Rates from the file for the kernels that a program launches. Missing ones are measured and added to the file.

    Raises OptionError for a file that cannot be read or written, or that is of another target or number of threads.
    """
    known = _read(path)
    if known is not None and (known.target, known.threads) != (target, threads):
        raise OptionError(
            f"the rates are of {counted(known.threads, 'thread')} of {known.target}, not of {threads} of {target}",
            at=path,
            fix="name another file, or use the same number of threads",
        )
    if known is not None and {kind_of(launch) for launch in program.launches} <= known.rates.kinds.keys():
        return known.rates
    rates = measure(program)
    unmeasured = {kind_of(launch) for launch in program.launches} - rates.kinds.keys()
    rates = replace(rates, kinds=rates.kinds | {kind: rates.of(kind) for kind in sorted(unmeasured)})
    if known is not None:
        rates = replace(known.rates, kinds=rates.kinds | known.rates.kinds)
    _write(path, RecordedRates(target, threads, rates))
    return rates


def _read(path: Path) -> RecordedRates | None:
    """Read the recorded rates; None if the file does not exist."""
    try:
        return from_json(RecordedRates, json.loads(path_argument("rates", path).read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        return None
    except EngineFormatError as error:
        problem = f"the rates cannot be read: {error.problem}"
    except (OSError, ValueError) as error:
        problem = f"the rates cannot be read: {error}"
    raise OptionError(problem, at=path, fix="remove the file, so that the machine is measured again")


def _write(path: Path, record: RecordedRates) -> None:
    try:
        path.write_text(json.dumps(to_json(record), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"the rates cannot be written: {error}", at=path, fix="name another file") from None
