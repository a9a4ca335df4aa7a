"""One operator's call, as its translation sees it: inputs, attributes, and how to refuse it by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import SymInt, Tensor

from llmc.errors import CaptureError
from llmc.frontends.onnx.constants import NUMPY_DTYPES
from llmc.frontends.onnx.model import OnnxNode

# Sizes and other small numbers are known while the graph is translated, except T, a SymInt; tensors are traced.
Known = NDArray[Any]
Value = Tensor | Known
Number = float | int | bool | SymInt
_TORCH_DTYPES = {kind: dtype for dtype, kind in NUMPY_DTYPES.items() if dtype is not torch.bfloat16}
Translated = Value | tuple[Value | None, ...]


@dataclass(frozen=True)
class Call:
    """A call of an ONNX operator. opset: the version of the operator's domain. positions: [1, T]. dtypes: in which
    another one than the graph's is computed in. inputs: None if left out. makes_numbers: whether its result is known
    numbers (numbers.py)."""

    node: OnnxNode
    inputs: tuple[Value | None, ...]
    opset: int
    positions: Tensor
    dtypes: Mapping[torch.dtype, torch.dtype]
    makes_numbers: bool = False

    def has(self, index: int) -> bool:
        """Whether an input is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def value(self, index: int) -> Value:
        """An input; raises CaptureError if it was left out."""
        value = self.inputs[index] if index < len(self.inputs) else None
        if value is None:
            raise self.refused(f"it has no input {index}", fix="export the model again")
        return value

    def tensor(self, index: int) -> Tensor:
        """An input as a tensor."""
        return as_tensor(self.value(index))

    def operand(self, index: int) -> Any:
        """An input: known numbers where the result is known numbers, else a tensor."""
        return self.known(index) if self.makes_numbers else self.tensor(index)

    def optional(self, index: int) -> Tensor | None:
        """An input as a tensor, or None if it was left out."""
        return self.tensor(index) if self.has(index) else None

    def known(self, index: int) -> Known:
        """An input whose numbers are known; raises CaptureError where they depend on tokens."""
        value = self.value(index)
        if isinstance(value, Tensor):
            raise self.refused(
                f"its input {self.node.inputs[index]!r:.80} is computed while the model runs",
                fix="export the model so that sizes, axes and conditions do not depend on the values of tokens",
            )
        return value

    def integers(self, index: int) -> list[Any]:
        """The known whole numbers of an input; T among them is a SymInt."""
        return [number if isinstance(number, SymInt) else int(number) for number in self.known(index).reshape(-1)]

    def integer(self, name: str, default: int | None = None) -> int:
        """An attribute."""
        return int(self._attribute(name, int, default))

    def real(self, name: str, default: float | None = None) -> float:
        """An attribute."""
        return float(self._attribute(name, float, default))

    def text(self, name: str, default: str | None = None) -> str:
        """An attribute."""
        return str(self._attribute(name, str, default))

    def axes(self, name: str = "axes", index: int = 1) -> list[int] | None:
        """The whole numbers of an attribute, or in later opsets of an input; None if there is neither."""
        axes = self.node.attributes.get(name)
        if isinstance(axes, tuple):
            return [int(axis) for axis in axes]
        return self.integers(index) if self.has(index) else None

    def slices(self) -> Iterator[tuple[Any, Any, int, int]]:
        """(start, end, axis, step) of each axis that a Slice cuts; one that is negative counts from the end."""
        starts, ends = self.axes("starts", 1), self.axes("ends", 2)
        if starts is None or ends is None:
            raise self.refused("it does not say from where to where")
        axes = self.axes("axes", 3) or list(range(len(starts)))
        steps = self.integers(4) if self.has(4) else [1] * len(starts)
        return zip(starts, ends, axes, steps, strict=True)

    def unless(self, condition: bool, problem: str, fix: str | None = None) -> None:
        """Raise CaptureError if the condition does not hold."""
        if not condition:
            raise self.refused(problem, fix)

    def refused(self, problem: str, fix: str | None = None) -> CaptureError:
        """The error that names the node."""
        return CaptureError(
            f"{self.node.label}: {problem}",
            at=self.node.op,
            fix=fix
            or "export the model again in another way, or build it from its safetensors; docs/onnx.md lists "
            "the supported operators",
        )

    def _attribute(self, name: str, kind: type, default: Any) -> Any:
        value = self.node.attributes.get(name, default)
        if value is None or not isinstance(value, kind | int if kind is float else kind):
            raise self.refused(f"its attribute {name} is {value!r:.60}", fix="export the model again")
        return value


# Translations of operators to torch and llmc ops, by domain and name.
Translations = Mapping[tuple[str, str], Callable[[Call], Translated]]


def as_tensor(value: Value) -> Tensor:
    """Known numbers as a tensor; of symbols, only T may be among them."""
    if isinstance(value, Tensor):
        return value
    if value.dtype != object:
        return torch.tensor(value.tolist(), dtype=torch_dtype(value)).reshape(value.shape)
    parts = [torch.full((), number, dtype=torch.int64) for number in value.reshape(-1)]
    return torch.stack(parts).reshape(value.shape) if parts else torch.empty(value.shape, dtype=torch.int64)


def torch_dtype(value: Known) -> torch.dtype:
    """The dtype of known numbers."""
    return torch.int64 if value.dtype == object else _TORCH_DTYPES[value.dtype.type]
