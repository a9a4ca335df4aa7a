"""Read the operands of an instruction; names mean what the innermost scope around it says."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from llmc.ptx.errors import PtxError
from llmc.ptx.module import Address, Guard, Immediate, Operand, Pair, Register, Sink, Special, Symbol, Vector
from llmc.ptx.statements import REBUILD

_GUARD = re.compile(r"@(!?)\s*([\w$%]+)\s+(.*)")
# Sixteen, two, eight or ten is the base.
_WHOLE = re.compile(r"(-?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0([0-7]+)|(\d+))U?")
_BASES = (16, 2, 8, 10)
_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]{8,16})")
_DECIMAL = re.compile(r"-?\d+\.\d*(?:[eE][-+]?\d+)?")
_NAME = re.compile(r"[A-Za-z_$%][\w$.]*")
# How the names of all special registers begin, after the percent sign.
_SPECIALS = re.compile(
    "%(?:tid|ntid|ctaid|nctaid|laneid|warpid|nwarpid|lanemask|smid|nsmid|gridid|cluster|ncluster|is_explicit_cluster|"
    "clock|globaltimer|pm|envreg|current_graph|dynamic_smem|total_smem|aggr_smem|reserved_smem)"
)


@dataclass
class Scope:
    """The declarations between two braces. number: number of scopes opened before it. labels: all labels, including
    later ones."""

    number: int
    outer: "Scope | None"
    labels: frozenset[str]
    registers: dict[str, Register] = field(default_factory=dict)

    def register(self, name: str) -> Register | None:
        register = self.registers.get(name)
        return register if register is not None or self.outer is None else self.outer.register(name)

    def label(self, name: str) -> str:
        """Return the label's name among all labels of the kernel: two scopes may each have one of the same name."""
        scope: Scope | None = self
        while scope is not None and name not in scope.labels:
            scope = scope.outer
        return name if scope is None or scope.outer is None else f"{name}@{scope.number}"


def parse_guard(text: str, scope: Scope, at: str) -> tuple[Guard | None, str]:
    """The guard in front of an instruction, if any, and the rest of the text."""
    match = _GUARD.match(text)
    if match is None:
        return None, text
    register = scope.register(match[2])
    if register is None or not register.is_predicate:
        raise PtxError(f"the guard {match[2]!r} is not a declared predicate", at=at, fix=REBUILD)
    return Guard(register, bool(match[1])), match[3]


def parse_operands(text: str, scope: Scope, at: str) -> tuple[Operand, ...]:
    """The operands that commas divide. Raises PtxError for a register that is not declared."""
    return tuple(_operand(piece, scope, at) for piece in _divided(text) if piece)


def _divided(text: str) -> Iterator[str]:
    """Split at commas outside of brackets."""
    depth, start = 0, 0
    for place, character in enumerate(text):
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _operand(text: str, scope: Scope, at: str) -> Operand:
    if text.startswith("{"):
        return Vector(parse_operands(text.strip("{} "), scope, at))
    if text.startswith("["):
        return _address(text[1:-1], scope, at)
    if "|" in text:
        first, _, second = text.partition("|")
        return Pair(_operand(first.strip(), scope, at), _operand(second.strip(), scope, at))
    if text == "_":
        return Sink()
    if match := _FLOAT.fullmatch(text):
        return Immediate(int(match[2], 16), 4 if match[1] in "fF" else 8)
    if _DECIMAL.fullmatch(text):
        return Immediate(int.from_bytes(struct.pack("<d", float(text)), "little"), 8)
    if _WHOLE.fullmatch(text):
        return Immediate(_whole(text, at))
    return _named(text, scope, at)


def _whole(text: str, at: str) -> int:
    match = _WHOLE.fullmatch(text)
    if match is None:
        raise PtxError(f"{text!r} is not a whole number", at=at, fix=REBUILD)
    sign, *digits = match.groups()
    value = next(int(group, base) for group, base in zip(digits, _BASES, strict=True) if group is not None)
    return -value if sign else value


def _named(text: str, scope: Scope, at: str) -> Operand:
    stem, plus, offset = text.partition("+")
    name = stem.strip()
    register = scope.register(name)
    if register is not None and not plus:
        return register
    if _SPECIALS.match(name):
        return Special(name)
    if _NAME.fullmatch(name) is None or name.startswith("%"):
        raise PtxError(f"the operand {text!r} is not a declared register", at=at, fix=REBUILD)
    return Symbol(scope.label(name), _whole(offset.strip() or "0", at))


def _address(text: str, scope: Scope, at: str) -> Address:
    base, *rest = _divided(text)
    coordinates = _operand(rest[0], scope, at) if rest else Vector(())
    if not isinstance(coordinates, Vector):
        raise PtxError(f"the address [{text}] cannot be read", at=at, fix=REBUILD)
    stem, plus, offset = base.partition("+")
    return Address(_operand(stem.strip(), scope, at), _whole(offset.strip(), at) if plus else 0, coordinates.items)
