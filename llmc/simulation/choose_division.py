"""`parallel="auto"`: divide the ranks of a build as the simulator finds best under a load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import OptionError
from llmc.options import parse_options

if TYPE_CHECKING:
    from llmc.frontends.captured import Model
    from llmc.frontends.front_end import OpenedModel
    from llmc.passes.rewrite import Pass
    from llmc.simulation.compare import Comparison
    from llmc.simulation.divisions import Division
    from llmc.simulation.pricing import Machine
    from llmc.targets import Target

# Concurrent requests of the assumed load.
REQUESTS = 200


@dataclass(frozen=True)
class DivisionWish:
    """The request to choose a division. parallel: "auto", or None for a build as its options divide it. ranks: how many
    there are. memory: GB of one, by default the target's. trace: the load, as `llmc simulate` takes it; by default
    REQUESTS requests at once."""

    parallel: str | None = None
    ranks: int | None = None
    memory: float | None = None
    trace: Path | None = None

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise OptionError for contradicting options. options: those of the build."""
        if self.parallel not in (None, "auto"):
            raise OptionError(f"unknown plan {self.parallel!r}", at=f"parallel={self.parallel!r}", fix="use auto")
        if self.parallel is None:
            set_fields = [name for name in ("ranks", "memory", "trace") if getattr(self, name) is not None]
            if set_fields:
                raise OptionError(
                    f"{set_fields[0]} applies only to automatic plans", at=set_fields[0], fix="use parallel auto"
                )
        elif type(self.ranks) is not int:
            seen = "" if self.ranks is None else f", not {self.ranks!r}"
            raise OptionError(f"an automatic plan needs the number of ranks{seen}", at="ranks", fix="give their number")
        elif self.memory is not None and (type(self.memory) not in (int, float) or not 0 < self.memory < math.inf):
            raise OptionError(f"a rank cannot have {self.memory!r} GB", at="memory", fix="give a number above 0")
        elif options.get("tensor_parallel_size", 1) > 1 or options.get("pipeline_parallel_size", 1) > 1:
            raise OptionError(
                "the ranks are divided already",
                at="parallel=auto",
                fix="leave out tensor_parallel_size and pipeline_parallel_size, or parallel",
            )


@dataclass(frozen=True)
class Considered:
    """The divisions that were compared, and the chosen one. comparison: the comparison of every division of a machine's
    ranks that can be built, under a load of `requests` requests."""

    comparison: Comparison
    machine: Machine
    requests: int

    @property
    def best(self) -> Division:
        """Return the best division. Raises OptionError if no division can serve the load; the error names one that
        could."""
        from llmc.simulation.compare import best_or_refuse

        return best_or_refuse(self.comparison, self.machine).division

    def sizes(self) -> dict[str, int]:
        """The best division as build options; replicas are options of the server. Raises OptionError as `best`."""
        layout = self.best.layout
        return {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}


def consider_divisions(
    model: Model | OpenedModel[Any],
    target: Target,
    wish: DivisionWish,
    options: Mapping[str, Any],
    passes: Sequence[Pass],
    progress: Callable[[str], None] = lambda doing: None,
) -> Considered:
    """Simulate the load on every division of the ranks, and return the best with its comparison.

    Args:
        model: The model to build, opened or not.
        target: The kind of each rank.
        wish: The number of ranks, their memory, and the load to serve.
        options: Keywords of the build.
        passes: The passes of the build.
        progress: Called with a phrase before each step of the work.

    Raises:
        LlmcError: The model, the trace or an option cannot be used.
    """
    # Here, because they take long to import.
    from llmc.bench.prompts import PromptShape
    from llmc.frontends.capture import capture
    from llmc.simulation.load import drawn_load, longest, read_trace
    from llmc.simulation.rent import machine_of, rent_for_model

    assert wish.ranks is not None, "the wish was checked"
    load = drawn_load(PromptShape(), REQUESTS, None, 0) if wish.trace is None else read_trace(wish.trace)
    machine = machine_of(target, wish.ranks, memory_bytes=None if wish.memory is None else int(wish.memory * 1e9))
    parsed = parse_options({**options, "max_model_len": options.get("max_model_len") or longest(load)})
    progress("capturing")
    captured = capture(model, parsed, may_lack_weights=True)
    best = rent_for_model(captured, passes, parsed, machine, load, {}, progress)(wish.ranks)
    return Considered(best, machine, len(load))
