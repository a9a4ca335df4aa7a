"""Why the machine does not execute an instruction."""

from dataclasses import dataclass

from llmc.ptx.module import Instruction


@dataclass(frozen=True)
class Refusal:
    """The reason why an instruction is not supported. reason: with the opcode's name. instruction: the unsupported
    one."""

    reason: str
    instruction: Instruction


class Refused(Exception):
    """A Refusal that is raised, which ends the building of an instruction where it is found."""

    def __init__(self, reason: str, instruction: Instruction) -> None:
        super().__init__(reason)
        self.refusal = Refusal(reason, instruction)
