"""Every opcode that the machine knows, by its name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action, elementwise
from llmc.ptx.instructions.arithmetic import ARITHMETIC, build_arithmetic
from llmc.ptx.instructions.async_copies import build_cp_async
from llmc.ptx.instructions.atomics import build_atomic
from llmc.ptx.instructions.bits import BITS, build_lop3
from llmc.ptx.instructions.bulk_copies import build_bulk
from llmc.ptx.instructions.compare import build_selp, build_setp, build_slct
from llmc.ptx.instructions.control import (
    build_barrier,
    build_branch,
    build_indexed_branch,
    build_return,
    collective,
    guarded_action,
    guarded_end,
)
from llmc.ptx.instructions.convert import build_cvt, build_cvta
from llmc.ptx.instructions.fences import build_fence, build_grid_dependency, build_hint, build_policy
from llmc.ptx.instructions.integers import build_carrying
from llmc.ptx.instructions.load_store import build_ld, build_st
from llmc.ptx.instructions.matrices import build_ldmatrix, build_mma, build_stmatrix
from llmc.ptx.instructions.mbarrier import build_mbarrier, build_wait
from llmc.ptx.instructions.moves import build_mov
from llmc.ptx.instructions.tensor_maps import build_tensormap
from llmc.ptx.instructions.warps import build_elect, build_redux, build_shfl, build_vote, build_warp_barrier
from llmc.ptx.instructions.wgmma import build_wgmma
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.module import Instruction, Kernel
from llmc.ptx.team import End, Ending

Builder = Callable[[Operands, Modifiers], Action]


def _build_cp(operands: Operands, modifiers: Modifiers) -> Action:
    modifiers.one_of("async")
    return (build_bulk if modifiers.flag("bulk") else build_cp_async)(operands, modifiers)


# Instructions of single threads.
ACTIONS: Mapping[str, Builder] = MappingProxyType(
    {
        **dict.fromkeys(ARITHMETIC, build_arithmetic),
        **{name: elementwise(chooser) for name, chooser in BITS.items()},
        **dict.fromkeys(("atom", "red"), build_atomic),
        **dict.fromkeys(("fence", "membar"), build_fence),
        **dict.fromkeys(("prefetch", "nanosleep"), build_hint),
        "cp": _build_cp,
        "createpolicy": build_policy,
        "cvt": build_cvt,
        "cvta": build_cvta,
        "griddepcontrol": build_grid_dependency,
        "ld": build_ld,
        "lop3": build_lop3,
        "madc": build_carrying,
        "mbarrier": build_mbarrier,
        "mov": build_mov,
        "selp": build_selp,
        "setp": build_setp,
        "slct": build_slct,
        "st": build_st,
        "tensormap": build_tensormap,
    }
)
# Instructions of whole warps.
COLLECTIVES: Mapping[str, Builder] = MappingProxyType(
    {
        "elect": build_elect,
        "ldmatrix": build_ldmatrix,
        "mma": build_mma,
        "redux": build_redux,
        "setmaxnreg": build_hint,
        "shfl": build_shfl,
        "stmatrix": build_stmatrix,
        "vote": build_vote,
        "wgmma": build_wgmma,
    }
)


def build(instruction: Instruction, place: int, symbols: Mapping[str, int], kernel: Kernel) -> Action | Ending:
    """A function that executes an instruction of a kernel.

    Raises:
        Refused: the machine does not know the opcode.
    """
    modifiers, operands, guard = Modifiers(instruction), Operands(instruction, symbols), instruction.guard
    if modifiers.name == "bra":
        return Ending(build_branch(operands, modifiers, place, kernel.labels, guard))
    end = build_indexed_branch(operands, modifiers, kernel) if modifiers.name == "brx" else None
    end = end or _end(operands, modifiers, place)
    if end is not None:
        return Ending(guarded_end(end, guard, place))
    if modifiers.name in ACTIONS:
        return guarded_action(ACTIONS[modifiers.name](operands, modifiers), guard)
    raise modifiers.refused("the machine does not know it")


def _end(operands: Operands, modifiers: Modifiers, place: int) -> End | None:
    """The end for an instruction at which threads may have to wait; None for others."""
    name = modifiers.name
    if name in ("ret", "exit"):
        return build_return(operands, modifiers)
    if name in ("bar", "barrier") and not modifiers.starts_with("warp", "sync"):
        return build_barrier(operands, modifiers, place)
    if name in ("bar", "barrier"):
        return collective(build_warp_barrier(operands, modifiers), place)
    if name == "mbarrier" and any(modifiers.begins(verb) for verb in ("try_wait", "test_wait")):
        return build_wait(operands, modifiers, place)
    if name == "tensormap" and modifiers.begins("cp_fenceproxy"):
        return collective(build_tensormap(operands, modifiers), place)
    return collective(COLLECTIVES[name](operands, modifiers), place) if name in COLLECTIVES else None
