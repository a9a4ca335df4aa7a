"""The opcodes that mean one thing for whole numbers and another for floats: the type decides."""

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action, applied
from llmc.ptx.instructions.floats import FLOATS
from llmc.ptx.instructions.halves import HALF_FUNCTIONS, HALVES
from llmc.ptx.instructions.integers import INTEGERS, WHOLE, build_carrying
from llmc.ptx.modifiers import Modifiers

ARITHMETIC = frozenset({*INTEGERS, *FLOATS, *HALF_FUNCTIONS})


def build_arithmetic(operands: Operands, modifiers: Modifiers) -> Action:
    """An opcode of ARITHMETIC, by its type."""
    name = modifiers.name
    if name == "mad" and modifiers.instruction.opcode.split(".")[2:3] == ["cc"]:
        return build_carrying(operands, modifiers)
    kind = modifiers.last()
    table = (
        HALF_FUNCTIONS if kind in HALVES else FLOATS if kind in ("f32", "f64") else INTEGERS if kind in WHOLE else {}
    )
    if name not in table:
        raise modifiers.refused(f"the machine does not know it of .{kind}")
    chosen = table[name](modifiers, kind)
    modifiers.finish()
    operands.count(1 + len(chosen.sources))
    return applied(operands, chosen)
