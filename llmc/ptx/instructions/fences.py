"""Fences, hints, and the order of launches."""

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action
from llmc.ptx.lanes import U64, Mask, constant
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.team import Team

_SCOPES = ("cta", "cluster", "gpu", "sys")


def build_fence(operands: Operands, modifiers: Modifiers) -> Action:
    """fence and membar. Instructions execute sequentially, so only the fences between proxies have an effect: the
    machine checks what asynchronous operations may see."""
    if modifiers.flag("proxy"):
        return _proxy_fence(operands, modifiers)
    if modifiers.flag("mbarrier_init"):
        modifiers.one_of("release")
        modifiers.one_of("cluster")
    else:
        modifiers.maybe("sc", "acq_rel", "acquire", "release", "gl")
        modifiers.maybe(*_SCOPES)
    modifiers.finish()
    operands.count(0)
    return nothing


def _proxy_fence(operands: Operands, modifiers: Modifiers) -> Action:
    if modifiers.flag("async"):
        is_global = modifiers.maybe("global", "shared::cta", "shared::cluster") == "global"
        modifiers.finish()
        operands.count(0)
        return nothing if is_global else _fence_async
    modifiers.one_of("tensormap::generic")
    acquires = modifiers.one_of("acquire", "release") == "acquire"
    modifiers.one_of(*_SCOPES)
    modifiers.finish()
    if not acquires:
        operands.count(0)
        return nothing
    operands.count(2)
    address = operands.address(0)
    return lambda team, mask: team.tensor_maps.acquire(team.chosen(address(team), mask), team.lanes(mask))


def _fence_async(team: Team, mask: Mask) -> None:
    team.order.fence(team.order.warps_of(mask))


def nothing(team: Team, mask: Mask) -> None:
    """Execute an instruction that only affects a device's speed, or an order that is kept anyway: do nothing."""


def build_hint(operands: Operands, modifiers: Modifiers) -> Action:
    """prefetch, nanosleep, setmaxnreg and similar ones, whose modifiers do not change the result."""
    return nothing


def build_policy(operands: Operands, modifiers: Modifiers) -> Action:
    """createpolicy: what a cache is to do."""
    write = operands.writer(0, U64)
    policy = constant(0, U64)
    return lambda team, mask: write(team, policy, mask)


def build_grid_dependency(operands: Operands, modifiers: Modifiers) -> Action:
    """griddepcontrol: wait for the launches before this one, or let those after it begin."""
    verb = modifiers.one_of("wait", "launch_dependents")
    modifiers.finish()
    operands.count(0)
    return _wait_for_grids if verb == "wait" else nothing


def _wait_for_grids(team: Team, mask: Mask) -> None:
    team.has_waited[team.lanes(mask)] = True
