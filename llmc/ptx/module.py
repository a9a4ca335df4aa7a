"""The contents of a PTX file: its kernels, their registers and instructions, and their source lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Bytes of a register; a predicate is counted as one.
REGISTER_BYTES = {
    "pred": 1,
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "b128": 16,
}


@dataclass(frozen=True)
class Register:
    """A register of a kernel. index: its place among all of the kernel's registers. nbytes: 1 for a predicate."""

    name: str
    index: int
    nbytes: int
    is_predicate: bool

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Special:
    """A register that the machine fills, such as `%tid.x`."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Immediate:
    """A number in the text. A float is its bits. float_bytes: 4 or 8 for `0f…` and `0d…`, 0 for a whole number."""

    value: int
    float_bytes: int = 0

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, plus some bytes; of a branch, the label."""

    name: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.name}+{self.offset}" if self.offset else self.name


@dataclass(frozen=True)
class Sink:
    """`_`: a discarded result."""

    def __str__(self) -> str:
        return "_"


@dataclass(frozen=True)
class Vector:
    """`{a, b, …}`."""

    items: tuple["Operand", ...]

    def __str__(self) -> str:
        return f"{{{', '.join(map(str, self.items))}}}"


@dataclass(frozen=True)
class Pair:
    """`value|predicate`: two results."""

    first: "Operand"
    second: "Operand"

    def __str__(self) -> str:
        return f"{self.first}|{self.second}"


@dataclass(frozen=True)
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` of a tensor copy."""

    base: "Operand"
    offset: int = 0
    coordinates: tuple["Operand", ...] = ()

    def __str__(self) -> str:
        text = f"{self.base}+{self.offset}" if self.offset else str(self.base)
        return f"[{text}, {{{', '.join(map(str, self.coordinates))}}}]" if self.coordinates else f"[{text}]"


Operand = Register | Special | Immediate | Symbol | Sink | Vector | Pair | Address


@dataclass(frozen=True)
class SourceLine:
    """A line of the source that was compiled. called_from: where the function that has it was inlined."""

    file: str
    line: int
    called_from: "SourceLine | None" = None

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}"
        return text if self.called_from is None else f"{text}, called from {self.called_from}"


@dataclass(frozen=True)
class Guard:
    """`@register` or `@!register`."""

    register: Register
    is_negated: bool


@dataclass(frozen=True)
class Instruction:
    """An instruction of PTX. opcode: the whole name, modifiers included. line: the line of the PTX file, from 1."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    source: SourceLine | None

    def __str__(self) -> str:
        guard = "" if self.guard is None else f"@{'!' if self.guard.is_negated else ''}{self.guard.register} "
        return f"{guard}{self.opcode} {', '.join(map(str, self.operands))}".strip()


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel. type: its PTX type; count: elements of an array, 1 for a number. offset: in bytes."""

    name: str
    type: str
    count: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Variable:
    """A variable in memory. space: shared, global, const or local. nbytes: 0 if the launch decides."""

    name: str
    space: str
    nbytes: int
    alignment: int
    content: bytes = b""


@dataclass(frozen=True)
class Kernel:
    """An entry of a module. labels: the index of the instruction after each label. branch_tables: the labels that an
    indexed branch chooses from, by the name of their list. threads, cluster: threads of a block, and blocks of a
    cluster, in each direction; empty if the launch decides."""

    name: str
    parameters: tuple[Parameter, ...]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    branch_tables: Mapping[str, tuple[str, ...]]
    registers: tuple[Register, ...]
    variables: Mapping[str, Variable]
    threads: tuple[int, ...] = ()
    cluster: tuple[int, ...] = ()


@dataclass(frozen=True)
class Module:
    """A PTX file. name: the name of the file, for errors."""

    name: str
    version: tuple[int, int]
    target: str
    kernels: Sequence[Kernel]
