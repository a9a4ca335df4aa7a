"""The parts of an opcode, consumed one by one; a remainder is an unknown modifier."""

from llmc.ptx.module import Instruction
from llmc.ptx.refusal import Refused

# How opcodes name the shared memory of a thread's own block.
SHARED = ("shared", "shared::cta")


class Modifiers:
    """`cvt.rn.bf16x2.f32` has the name cvt and three modifiers."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.name, *self._rest = instruction.opcode.split(".")

    def flag(self, name: str) -> bool:
        """Whether the modifier is there; it is taken."""
        if name not in self._rest:
            return False
        self._rest.remove(name)
        return True

    def one_of(self, *names: str) -> str:
        """The first modifier that is among the names; it is taken. Raises Refused if none is there."""
        for given in self._rest:
            if given in names:
                self._rest.remove(given)
                return given
        raise self.refused(f"it has none of {', '.join(f'.{name}' for name in names)}")

    def maybe(self, *names: str) -> str | None:
        """Return the same as `one_of`, but None if the opcode has none of them."""
        return self.one_of(*names) if any(name in names for name in self._rest) else None

    def next(self) -> str:
        """The first modifier that is left; it is taken. Raises Refused if none is left."""
        if not self._rest:
            raise self.refused("it has too few modifiers")
        return self._rest.pop(0)

    def last(self) -> str:
        """The last modifier, such as a type; it is taken. Raises Refused if none is left."""
        if not self._rest:
            raise self.refused("it has no type")
        return self._rest.pop()

    def begins(self, name: str) -> bool:
        """Whether the first modifier that is left is that one."""
        return self._rest[:1] == [name]

    def starts_with(self, *names: str) -> bool:
        """Consume the next modifiers if they are `names`; return whether they are."""
        if tuple(self._rest[: len(names)]) != names:
            return False
        del self._rest[: len(names)]
        return True

    def finish(self) -> None:
        """Raise Refused if modifiers are left."""
        if self._rest:
            raise self.refused(f"the machine does not know .{'.'.join(self._rest)} of it")

    def refused(self, why: str) -> Refused:
        """Return the refusal of an unknown opcode."""
        return Refused(f"{self.instruction.opcode}: {why}", self.instruction)
