"""Weights of a module or an exported program, which are already in memory."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from llmc.errors import CheckpointError


class MemorySource:
    """A WeightSource over named tensors, which it refers to and never copies or changes."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, sorted."""
        return tuple(sorted(self._tensors))

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU; raises CheckpointError if there is none of that name."""
        if name not in self._tensors:
            raise CheckpointError(f"the model has no parameter {name!r}", fix="compile the model again")
        return self._tensors[name].detach().cpu()


def parameters_of(module: nn.Module) -> MemorySource:
    """The parameters of a module by name."""
    return MemorySource(dict(module.named_parameters()))


def parameter_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating-point parameter; None without one."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def tied_names(module: nn.Module) -> dict[str, str]:
    """The name of every parameter to the first name of the same parameter: equal for tied ones."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
