"""The time of a step of one replica, through all of its stages."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import TargetError
from llmc.prediction.cost_expression import evaluate_expression
from llmc.prediction.hand_over import hand_over_seconds
from llmc.prediction.rates import Rates
from llmc.prediction.step_price import StepPrice, cpu_price, gpu_price
from llmc.prediction.step_shape import StepShape
from llmc.program import Launch, Program, RankLayout
from llmc.program.joined_program import HAND_OVER
from llmc.simulation.programs import stages_of
from llmc.targets import Target
from llmc.targets.links import Link


@dataclass(frozen=True)
class Machine:
    """The hardware to simulate. target: the target of each rank. memory: bytes of one rank. rates: those of a CPU,
    measured with all of its threads; None for GPUs. threads: number of these threads. recorded: the file that records
    the rates. custom: whether small collectives use one-shot exchange instead of a library's ring. link: replaces the
    target's own link within a machine."""

    target: Target
    memory: int
    rates: Rates | None = None
    threads: int = 1
    recorded: Path | None = None
    custom: bool = True
    link: Link | None = None

    def joining(self, ranks: int) -> Link:
        """The link between this many ranks."""
        links = self.target.links
        return self.link if self.link is not None and ranks <= links.size else links.of(ranks)


def step_seconds(program: Program, layout: RankLayout, machine: Machine, ranks: int) -> Callable[[StepShape], float]:
    """A function from the shape of a step to its seconds. A step goes through one stage after the other, and the next
    begins when it has left the last. ranks: number of ranks of all replicas, which share a CPU.

    Raises TargetError for a target that nothing is known of.
    """
    stages = stages_of(program)
    handed = [launch for launch in program.launches if launch.family == HAND_OVER]
    prices = [_price(stage, program, layout, machine, ranks) for stage in stages]
    # Rows of GPUs pass through the host's memory, if all GPUs are in one machine.
    is_one_host = machine.target.compiled and layout.ranks <= machine.target.links.size
    send = hand_over_seconds if is_one_host else machine.joining(layout.ranks).send

    def seconds(step: StepShape) -> float:
        values = step.values()
        crossing = sum(send(evaluate_expression(launch.bytes_moved, values) / 2) for launch in handed)
        return crossing + sum(price.seconds(step) for price in prices)

    return seconds


def _price(
    launches: tuple[Launch, ...], program: Program, layout: RankLayout, machine: Machine, ranks: int
) -> StepPrice:
    own = [launch for launch in launches if launch.family != HAND_OVER]
    link = machine.joining(layout.tensor)
    if machine.target.compiled:
        gpu = machine.target.compiled[0]
        return gpu_price(own, program.limits, layout.tensor, gpu, link, custom=machine.custom)
    if machine.rates is None:
        raise TargetError(
            f"there are no measured rates of {machine.target.name} is here",
            at=f"target={machine.target.name}",
            fix="name a GPU, or the CPU of this machine: --target cpu",
        )
    return cpu_price(own, layout.tensor, machine.rates.of_a_rank(ranks, machine.threads), link)
