"""The tensors of two checkpoints: a model's by their own names, and its drafter's with a prefix."""

from collections.abc import Sequence

from torch import Tensor

from llmc.graph.stored_codes import CodeSource, RoundedAgain, StoredWeight, UnpackedCodes
from llmc.graph.weights import WeightSource


class JoinedSource:
    """A WeightSource. prefix: before the names of the second one's tensors."""

    def __init__(self, first: WeightSource, second: WeightSource, prefix: str) -> None:
        self._first, self._second, self._prefix = first, second, prefix

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, sorted."""
        return tuple(sorted((*self._first.names(), *(self._prefix + name for name in self._second.names()))))

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU; raises CheckpointError if it is missing."""
        if name.startswith(self._prefix):
            return self._second.load(name.removeprefix(self._prefix))
        return self._first.load(name)


class JoinedCodes(JoinedSource):
    """A CodeSource: the first one's weights may be codes, the second one's are numbers."""

    def __init__(self, first: CodeSource, second: WeightSource, prefix: str) -> None:
        super().__init__(first, second, prefix)
        self._codes = first
        self.is_quantized, self.gives_way = first.is_quantized, first.gives_way

    def weight(self, name: str) -> StoredWeight | None:
        """Return how the codes of a weight are stored; None for a weight without codes."""
        return None if name.startswith(self._prefix) else self._codes.weight(name)

    def rounded(self, name: str) -> RoundedAgain | None:
        """The codes to which a weight in unsupported blocks is rounded; None for any other weight."""
        return None if name.startswith(self._prefix) else self._codes.rounded(name)

    def are_alike(self, names: Sequence[str]) -> bool:
        """Whether the weights' codes can be rows of one matrix."""
        return not any(name.startswith(self._prefix) for name in names) and self._codes.are_alike(names)

    def unpacked(self, name: str) -> UnpackedCodes:
        """Return all parts of a weight of codes."""
        return self._codes.unpacked(name)

    def input_scale(self, name: str) -> Tensor | None:
        """The static scale of a weight's activations."""
        return self._codes.input_scale(name)


def joined(first: WeightSource, second: WeightSource, prefix: str) -> WeightSource:
    """Return a source of the weights of both, which is a CodeSource if the first one is."""
    return JoinedCodes(first, second, prefix) if isinstance(first, CodeSource) else JoinedSource(first, second, prefix)
