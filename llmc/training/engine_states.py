"""Training data from an engine's model: its own tokens, its hidden states, and its output matrix.

A normal CPU engine shows its hidden states without being built for it: the last product of a step reads them from the
arena, and nothing writes there after it. So the rows lie there when the step is over. The output matrix, which an
engine keeps in its kernels' layout, follows from rows of hidden states and their logits: logits = states · matrixᵀ has
one solution as soon as there are more rows than channels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from llmc.engine_format import EngineDirectory
from llmc.errors import OptionError
from llmc.program import RowCount, SideOutput, StepOutput
from llmc.program.launch_arguments import Operand
from llmc.runtime.executors.cpp import CppExecutor
from llmc.runtime.loop.step import Step

_STATES = "hidden_states"
# ‖states · matrixᵀ - logits‖ / ‖logits‖: above this, logits are not a product of the states. Rounded tokens reach 0.01.
_MOST_RESIDUAL = 0.05
# Rows that the matrix is found from, for each channel: with 49,152 tokens one row of logits takes 200 kB.
_ROWS_PER_CHANNEL = 4


@dataclass(frozen=True)
class Rows:
    """Hidden states and logits of a sequence. tokens: [rows + 1], of one sequence. states: [rows, channels], fp32,
    after each token but the last; logits: [rows, vocabulary], those that the model gives there."""

    tokens: Tensor
    states: Tensor
    logits: Tensor

    def without_logits(self) -> "Rows":
        """These rows without their logits, which take most of the memory."""
        return replace(self, logits=self.logits[:0].clone())

    def after(self, prompt: int) -> "Rows":
        """The rows from the last token of a prompt of `prompt` tokens on, which predict its continuation."""
        return Rows(self.tokens[prompt - 1 :], self.states[prompt - 1 :], self.logits[prompt - 1 :])


class StateReader:
    """An engine's model on whole sequences. Raises OptionError for an engine that shows no hidden states."""

    def __init__(self, directory: EngineDirectory, threads: int) -> None:
        self._limits = directory.program.limits
        blocks = self._limits.blocks_for(self._limits.max_model_len)
        self._executor = CppExecutor(directory.with_one_table(), blocks, threads, also=(_states_of(directory),))

    def read(self, tokens: Sequence[int]) -> Rows:
        """Read one sequence of at least two tokens, at most as long as the engine takes."""
        states, logits = [], []
        for step in self._steps(tokens[:-1]):
            logits.append(torch.from_numpy(self._executor.step(step).copy()))
            states.append(torch.from_numpy(self._executor.side_output(_STATES).astype(np.float32)))
        return Rows(torch.tensor(tokens), torch.cat(states), torch.cat(logits))

    def close(self) -> None:
        """Free the engine."""
        self._executor.close()

    def _steps(self, tokens: Sequence[int]) -> Iterator[Step]:
        """Chunks with logits for every token."""
        most = min(self._limits.max_logit_rows, self._limits.max_batch_tokens)
        for start in range(0, len(tokens), most):
            part = np.asarray(tokens[start : start + most], np.int32)
            places = np.arange(start, start + len(part), dtype=np.int32)
            end = start + len(part)
            yield Step(
                input_ids=part,
                positions=places,
                slot_mapping=places,
                query_starts=np.asarray([0, len(part)], np.int32),
                context_lens=np.asarray([end], np.int32),
                block_tables=np.arange(self._limits.blocks_for(end), dtype=np.int32)[None],
                logit_rows=np.arange(len(part), dtype=np.int32),
                tree_masks=np.zeros(len(part), np.int64),
            )


def _states_of(directory: EngineDirectory) -> SideOutput:
    """The input of the product that makes the logits, which is still available after the step."""
    program = directory.program
    launches = [x for x in program.launches if x.runs(tokens=1, logit_rows=1, wanted=StepOutput.LOGITS)]
    buffers = {buffer.name: buffer for buffer in program.buffers}
    while launches and "x" not in launches[-1].arguments:
        after = launches.pop().arguments.values()
        if any(isinstance(value, Operand) and value.space == "buffer" for value in after):
            launches.clear()
    x = launches[-1].arguments["x"] if launches else None
    buffer = buffers.get(x.name) if isinstance(x, Operand) and x.space == "buffer" else None
    if buffer is None or not isinstance(x, Operand) or x.offset or x.stride != buffer.columns:
        raise OptionError(
            f"the engine {directory.path.name}, for {directory.manifest.target.name}, shows no hidden states",
            at=str(directory.path),
            fix="build one for this machine's CPU: llmc build MODEL --target cpu -o ENGINE",
        )
    return SideOutput(_STATES, buffer.dtype, RowCount.LOGIT_ROWS, (buffer.columns,), buffer.name)


def is_enough(rows: Sequence[Rows]) -> bool:
    """Whether the output matrix follows from these rows."""
    return bool(rows) and sum(len(part.states) for part in rows) >= _ROWS_PER_CHANNEL * rows[0].states.shape[1]


def output_matrix(rows: Sequence[Rows]) -> Tensor:
    """[vocabulary, channels], fp32, by least squares. Raises OptionError if logits are not a product of the states."""
    channels = rows[0].states.shape[1]
    squares = torch.zeros(channels, channels, dtype=torch.float64)
    products = torch.zeros(channels, rows[0].logits.shape[1], dtype=torch.float64)
    for part in rows:
        states = part.states.double()
        squares += states.T @ states
        products += states.T @ part.logits.double()
    # So small that it changes only directions that no state has.
    squares += 1e-9 * squares.trace() / channels * torch.eye(channels, dtype=torch.float64)
    matrix: Tensor = torch.linalg.solve(squares, products).T.float().contiguous()
    states, logits = rows[0].states, rows[0].logits
    residual = float((states @ matrix.T - logits).norm() / logits.norm())
    if not residual <= _MOST_RESIDUAL:
        raise OptionError(
            f"the model's logits are not a product of its hidden states: they differ by {residual:.2f} of their size",
            at="llmc train-medusa",
            fix="models that cap their logits cannot be trained for; give more --tokens than the model has channels",
        )
    return matrix
