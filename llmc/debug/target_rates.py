"""What a target delivers, for predictions. Apart from the kinds of target: `llmc profile` asks, and needs no torch."""

from llmc.codegen.cpp.measured_rates import measured_rates
from llmc.prediction.rates import Rates, gpu_rates
from llmc.program import Program
from llmc.targets import Target, cpu_target_here


def target_rates(target: Target, program: Program, threads: int) -> Rates | None:
    """Of a CPU measured by the engine's own kernels, None where this machine lacks its instructions; of a GPU those of
    its data sheet; None for torch. Of one rank, where there are several. Raises ToolchainError without what measures.
    """
    if target.compiled:
        return gpu_rates(target.compiled[0])
    here = cpu_target_here(target.name)
    if here is None:
        return None
    return measured_rates(here, threads, program).of_a_rank(program.ranks, threads)
