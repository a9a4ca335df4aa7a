"""Read a step's side outputs from the arena."""

from collections.abc import Sequence

import numpy as np

from llmc.errors import EngineFormatError
from llmc.files.typed_json import REBUILD
from llmc.program import ITEMSIZES, Affine, Program, RowCount, SideOutput
from llmc.runtime.executors.executor import SideArray
from llmc.runtime.memory import Bytes


class SideOutputs:
    """The side outputs of a program whose steps run in an arena, and the size of the last step.

    also: what else steps happen to leave. Raises EngineFormatError for a side output whose buffer is missing, or of
    another kind.
    """

    def __init__(self, program: Program, also: Sequence[SideOutput] = ()) -> None:
        sides = (*program.side_outputs, *also)
        self._places = {side.name: (side, _offset(side, program)) for side in sides}
        self._bits = {name: 1 << i for i, name in enumerate(self._places)}
        self._tokens = self._logit_rows = 0

    def mask(self, names: Sequence[str]) -> int:
        """Return the mask of side outputs that the library takes: bit i for the program's i-th."""
        return sum(self._bits[name] for name in names)

    def note_step(self, tokens: int, logit_rows: int) -> None:
        """Record the size of the step that has run."""
        self._tokens, self._logit_rows = tokens, logit_rows

    def place(self, name: str) -> slice:
        """Return the bytes of a side output in the arena."""
        side, offset = self._places[name]
        begin = offset.at(tokens=self._tokens, logit_rows=self._logit_rows)
        return slice(begin, begin + self._rows(side) * side.columns * ITEMSIZES[side.dtype])

    def array(self, name: str, data: Bytes) -> SideArray:
        """Return a side output [rows, *shape]: a view of the bytes, except for two-byte numbers, which are copied."""
        side, _ = self._places[name]
        return _numbers(data, side.dtype).reshape(self._rows(side), *side.shape)

    def _rows(self, side: SideOutput) -> int:
        counts = {RowCount.TOKENS: self._tokens, RowCount.LOGIT_ROWS: self._logit_rows, RowCount.ONE: 1}
        return counts[side.rows]


def _offset(side: SideOutput, program: Program) -> Affine:
    buffer = next((buffer for buffer in program.buffers if buffer.name == side.buffer), None)
    if buffer is None or (buffer.dtype, buffer.rows, buffer.columns) != (side.dtype, side.rows, side.columns):
        raise EngineFormatError(f"the side output {side.name!r} does not fit the buffer {side.buffer!r}", fix=REBUILD)
    return buffer.offset


def _numbers(data: Bytes, dtype: str) -> SideArray:
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return data.view(np.float16).astype(np.float32)
    return data.view({"F32": np.float32, "I32": np.int32}[dtype])
