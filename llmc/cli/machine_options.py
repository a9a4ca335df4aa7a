"""What is simulated, as options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from llmc.cli.completion import complete_targets
from llmc.runtime.threads import thread_count
from llmc.targets import resolve_target

if TYPE_CHECKING:
    from llmc.simulation.pricing import Machine


@dataclass(frozen=True)
class MachineOptions:
    """A number of ranks of a target, and what joins them."""

    target: Annotated[str, Option(help="what each rank is: see `llmc targets`", autocompletion=complete_targets)] = (
        "h100"
    )
    ranks: Annotated[int, Option(help="how many of them")] = 8
    memory: Annotated[float | None, Option(help="GB of one rank; default: the target's")] = None
    link: Annotated[str | None, Option(help="what joins ranks, such as pcie-4; default: the target's")] = None
    disable_custom_all_reduce: Annotated[
        bool, Option("--disable-custom-all-reduce", help="collectives of a library only")
    ] = False
    threads: Annotated[int | None, Option(help="of a CPU, for all ranks; default: every core")] = None

    rates: Annotated[
        Path | None, Option(help="how fast this CPU is: read from this file, or measured and written there")
    ] = None

    def machine(self) -> Machine:
        """Raises TargetError, OptionError."""
        from llmc.simulation.rent import machine_of

        return machine_of(
            resolve_target(self.target),
            self.ranks,
            memory_bytes=None if self.memory is None else int(self.memory * 1e9),
            threads=thread_count(self.threads),
            custom=not self.disable_custom_all_reduce,
            link=self.link,
            recorded=self.rates,
        )
