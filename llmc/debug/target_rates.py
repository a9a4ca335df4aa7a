"""The rates of a target, for predictions. Separate from the target kinds, because `llmc profile` does not need
torch."""

from llmc.codegen.cpp.measured_rates import measured_rates
from llmc.prediction.rates import Rates, gpu_rates
from llmc.program import Program
from llmc.targets import Target, cpu_target_here


def target_rates(target: Target, program: Program, threads: int) -> Rates | None:
    """The rates of one rank. For a CPU they are measured with the engine's own kernels; None if this machine lacks its
    instructions. For a GPU they come from its data sheet. None for torch. Raises ToolchainError without a compiler to
    measure with.
    """
    if target.compiled:
        return gpu_rates(target.compiled[0])
    cpu = cpu_target_here(target.name)
    if cpu is None:
        return None
    return measured_rates(cpu, threads, program).of_a_rank(program.ranks, threads)
