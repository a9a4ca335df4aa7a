"""The tensors of two checkpoints: a model's by their own names, and those of what drafts for it after a prefix."""

from torch import Tensor

from llmc.graph.weights import WeightSource


class JoinedSource:
    """A WeightSource. prefix: before the names of the second one's tensors."""

    def __init__(self, first: WeightSource, second: WeightSource, prefix: str) -> None:
        self._first, self._second, self._prefix = first, second, prefix

    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted((*self._first.names(), *(self._prefix + name for name in self._second.names()))))

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU; raises CheckpointError if it is missing."""
        if name.startswith(self._prefix):
            return self._second.load(name.removeprefix(self._prefix))
        return self._first.load(name)
