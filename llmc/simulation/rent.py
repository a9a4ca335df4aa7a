"""Simulations for a model or an engine: the requested machine, and every division of its ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from llmc.codegen.cpp.measured_rates import measured_rates
from llmc.engine_format import read_engine
from llmc.errors import OptionError
from llmc.frontends.captured import Captured
from llmc.options import BuildOptions
from llmc.passes.rewrite import Pass
from llmc.program import Program, RankLayout
from llmc.runtime.memory import available_bytes
from llmc.simulation.compare import Comparison, compare
from llmc.simulation.divisions import division_of, divisions
from llmc.simulation.load import Arrival
from llmc.simulation.pricing import Machine
from llmc.simulation.programs import model_programs
from llmc.simulation.recorded_rates import rates_on_record
from llmc.targets import Target, cpu_target_here
from llmc.targets.links import LINKS


def machine_of(
    target: Target,
    ranks: int,
    *,
    memory_bytes: int | None = None,
    threads: int = 1,
    custom: bool = True,
    link: str | None = None,
    recorded: Path | None = None,
) -> Machine:
    """Return the machine that a simulation runs on.

    memory_bytes: memory of one rank; by default that of the target, or a CPU rank's part of the free memory here.
    link: a name of targets/links.py. recorded: as in Machine. Raises OptionError for an unknown link or zero memory.
    """
    if link is not None and link not in LINKS:
        raise OptionError(f"there is no link {link!r}", at=f"--link {link}", fix=f"links: {', '.join(LINKS)}")
    if memory_bytes is not None and memory_bytes < 1:
        raise OptionError(f"a rank cannot have {memory_bytes} bytes", at="--memory", fix="give more than 0 GB")
    if memory_bytes is None:
        memory_bytes = target.compiled[0].memory_bytes if target.compiled else available_bytes() // max(1, ranks)
    if recorded is not None and target.compiled:
        raise OptionError(f"no rates of {target.name} are measured", at=f"--rates {recorded}", fix="leave out --rates")
    joined = None if link is None else LINKS[link]
    return Machine(target, memory_bytes, threads=threads, recorded=recorded, custom=custom, link=joined)


Rent = Callable[[int], Comparison]


def rent_for_model(
    captured: Captured,
    passes: Sequence[Pass],
    options: BuildOptions,
    machine: Machine,
    load: Sequence[Arrival],
    goals: Mapping[str, float],
    progress: Callable[[str], None] = lambda doing: None,
) -> Rent:
    """Return a function from a number of ranks to every division of them, or only to the one that the options request.

    progress: called with a phrase before each step of the work.
    """
    layout = RankLayout(options.tensor_parallel_size, options.pipeline_parallel_size)
    programs = model_programs(captured, passes, options, machine.target, progress)
    program_of = cache(programs.program)
    measured = _measured(machine, lambda: program_of(RankLayout()))

    def rent(ranks: int) -> Comparison:
        ways = divisions(ranks) if layout.ranks == 1 else (division_of(layout, ranks),)
        name = machine.target.name
        return compare(
            ways,
            program_of,
            measured,
            load,
            goals,
            progress=lambda division: progress(f"simulating {division} of {name}"),
        )

    return rent


def rent_for_engine(engine: Path, machine: Machine, load: Sequence[Arrival], goals: Mapping[str, float]) -> Rent:
    """Return a function from a number of ranks to replicas of an engine. Raises OptionError for an engine in stages.
    The function raises it if the ranks are not a multiple of the engine's."""
    program = read_engine(engine, check_weights=False, check_machine=False).program
    if program.layout.pipeline > 1:
        raise OptionError("an engine in stages is not simulated", at=engine, fix="name the model that it was built of")
    measured = _measured(machine, lambda: program)
    return lambda ranks: compare((division_of(program.layout, ranks),), lambda layout: program, measured, load, goals)


def _measured(machine: Machine, program: Callable[[], Program]) -> Machine:
    """The machine with this CPU's measured rates, if the target is a CPU."""
    cpu = cpu_target_here(machine.target.name)
    if cpu is None:
        return machine
    measure = partial(measured_rates, cpu, machine.threads)
    if machine.recorded is None:
        return replace(machine, rates=measure(program()))
    return replace(machine, rates=rates_on_record(machine.recorded, cpu.name, machine.threads, program(), measure))
