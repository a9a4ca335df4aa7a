"""Arguments of a launch: operands, counts of the step, numbers and names. They are text only in JSON."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True)
class Operand:
    """A pointer, in JSON `space:name+offset/stride`, such as `buffer:qkv+2048/3072`.

    space: buffer (of the arena), weight, input (of the step, or of CHOICE_INPUTS), cache (`3.k` is layer 3's keys),
    state (`2` is the third), adapter (a pool), output (logits, CHOICE_OUTPUTS) or engine (its rank, ARRIVALS).
    offset: in elements, omitted if 0. stride: elements from row to row; None (omitted) if there are no rows.
    """

    space: str
    name: str
    offset: int = 0
    stride: int | None = None

    @property
    def pointer(self) -> "Operand":
        """Return the operand that points to the first row, without a stride."""
        return replace(self, stride=None)

    def __str__(self) -> str:
        offset = f"+{self.offset}" if self.offset else ""
        return f"{self.space}:{self.name}{offset}" + ("" if self.stride is None else f"/{self.stride}")

    @staticmethod
    def from_text(text: str) -> "Operand | None":
        """The operand of that text; None without the colon that every operand has. Raises ValueError."""
        if ":" not in text:
            return None
        match = _OPERAND.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r:.200} is not an operand")
        space, name, offset, stride = match.groups()
        return Operand(space, name, int(offset or 0), None if stride is None else int(stride))


_SPACES = "buffer|weight|input|cache|state|adapter|output|engine"
_OPERAND = re.compile(rf"({_SPACES}):([A-Za-z0-9_.]+)(?:\+(\d+))?(?:/(\d+))?")


class Count(Enum):
    """A number that each step says: its tokens, requested logit rows and requests, and the width of block_tables."""

    TOKENS = "T"
    LOGIT_ROWS = "L"
    REQUESTS = "R"
    MAX_BLOCKS = "max_blocks"

    def __str__(self) -> str:
        """Return the expression as a launch's grid shows it."""
        return self.value

    def at(self, counts: Mapping[str, int]) -> int:
        """Return the value in a step with these counts."""
        return counts[self.value]


@dataclass(frozen=True)
class Rows:
    """Several rows for each one that a count says, in JSON `4*L`."""

    times: int
    count: Count

    def __str__(self) -> str:
        """Return the expression as a launch's grid shows it."""
        return f"{self.times}*{self.count}"

    def at(self, counts: Mapping[str, int]) -> int:
        """Return the value in a step with these counts."""
        return self.times * counts[self.count.value]

    @staticmethod
    def from_text(text: str) -> "Rows | None":
        """The rows of that text; None for one of another kind."""
        match = _ROWS.fullmatch(text)
        return None if match is None else Rows(int(match[1]), Count(match[2]))


_ROWS = re.compile(r"([1-9]\d{0,3})\*(T|L)")

# A plain text is the name of an activation or of a format. None: an optional pointer that is not given.
Argument = Operand | Rows | Count | str | int | float | bool | None
