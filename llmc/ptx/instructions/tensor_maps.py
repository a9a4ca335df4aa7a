"""tensormap.replace and the copy of a map to where bulk copies read it."""

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action
from llmc.ptx.global_access import write_global
from llmc.ptx.lanes import NUMPY_TYPES, Mask, constant
from llmc.ptx.modifiers import SHARED, Modifiers
from llmc.ptx.module import Immediate
from llmc.ptx.team import Team
from llmc.ptx.tensor_map import FIELDS, NBYTES, replace_field

# Values outside of the tensor are zeros, and its elements are contiguous.
_PLAIN_ONLY = ("fill_mode", "interleave_layout")
_DIMENSIONED = ("box_dim", "global_dim", "element_stride", "global_stride")


def build_tensormap(operands: Operands, modifiers: Modifiers) -> Action:
    """tensormap.replace in shared memory, and tensormap.cp_fenceproxy from there to global memory."""
    if modifiers.flag("cp_fenceproxy"):
        return _publish(operands, modifiers)
    modifiers.one_of("replace")
    modifiers.one_of("tile")
    field = modifiers.one_of(*FIELDS)
    modifiers.one_of(*SHARED)
    modifiers.one_of("b1024")
    dtype = NUMPY_TYPES[modifiers.one_of("b32", "b64")]
    modifiers.finish()
    has_dimension = field in _DIMENSIONED
    operands.count(3 if has_dimension else 2)
    dimension = operands.number(1) if has_dimension else 0
    place = 2 if has_dimension else 1
    operand = operands.given[place]
    value = operands.reader(place, dtype)
    if field in _PLAIN_ONLY and (not isinstance(operand, Immediate) or operand.value):
        raise modifiers.refused(f"the machine supports only {field} 0")
    if isinstance(operand, Immediate):
        number = constant(operand.value, dtype)
        value = lambda team: number  # noqa: E731
    address, at = operands.address(0), operands.instruction

    def run(team: Team, mask: Mask) -> None:
        index, lanes, good = team.shared.locate(team.chosen(address(team), mask), team.lanes(mask), 16, at)
        values = team.chosen(value(team), mask)
        places = index[:, None] + np.arange(NBYTES)
        octets = team.shared.data[places]
        replace_field(octets, field, dimension, values if good is None else values[good])
        for part in range(0, NBYTES, 16):
            team.shared.shadow.write(index + part, 16, lanes, at)
        team.shared.data[places] = octets

    return run


def _publish(operands: Operands, modifiers: Modifiers) -> Action:
    """tensormap.cp_fenceproxy: one map for each warp."""
    for modifier in ("global", "shared::cta", "tensormap::generic", "release", "gpu", "sync", "aligned"):
        modifiers.one_of(modifier)
    modifiers.finish()
    operands.count(3)
    if operands.number(2) != NBYTES:
        raise operands.refused(operands.given[2])
    target, source, at = operands.address(0), operands.address(1), operands.instruction

    def run(team: Team, mask: Mask) -> None:
        leaders = team.leaders(mask)
        addresses = team.chosen(target(team), None)[leaders]
        index, lanes, _ = team.shared.locate(team.chosen(source(team), None)[leaders], leaders, 16, at)
        if len(lanes) < len(leaders):
            return
        for part in range(0, NBYTES, 16):
            team.shared.shadow.read(index + part, 16, lanes, at, whole_warp=True)  # Any thread may read any part.
            words = team.shared.load(index + part, 16)
            write_global(team, operands, addresses + part, words, 16, lambda places: lanes[places])
        team.tensor_maps.publish(addresses, lanes)

    return run
