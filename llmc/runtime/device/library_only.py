"""A program of several GPUs that cannot read each other's memory: collectives only by the library, for any rows."""

from dataclasses import replace

from llmc.program import Launch, Program
from llmc.program.launch_arguments import Operand
from llmc.program.library_collectives import FUNCTIONS

_RANKS = Operand("engine", "ranks")


def library_only(program: Program) -> Program:
    """The program without launches that read other ranks' memory; what served more rows than these serves all."""
    dropped = {
        (launch.origin.nodes, launch.only.last)
        for launch in program.launches
        if _reads_memory(launch) and launch.only is not None
    }

    def widened(launch: Launch) -> Launch:
        only = launch.only
        follows = only is not None and (launch.origin.nodes, only.first - 1) in dropped
        return replace(launch, only=None) if follows else launch

    kept = tuple(widened(launch) for launch in program.launches if not _reads_memory(launch))
    return replace(program, launches=kept, alternatives=())


def _reads_memory(launch: Launch) -> bool:
    return launch.arguments.get("ranks_ptr") == _RANKS and launch.family not in FUNCTIONS
