"""How the weights of a checkpoint are stored as codes, as data: a scheme, and the modules that it is for."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from llmc.frontends.checkpoints.safetensors import SafetensorsSource
from llmc.graph.stored_codes import UnpackedCodes

# By the bits of integer codes, the format that has them exactly.
INTEGERS: Mapping[int, str] = {2: "int4", 3: "int4", 4: "int4", 8: "int8"}


class StoredParts:
    """The tensors of one weight, by their suffixes."""

    def __init__(self, files: SafetensorsSource, names: Mapping[str, str]) -> None:
        self._files, self.names = files, names

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.names

    def shape(self, suffix: str) -> tuple[int, ...]:
        """The shape of a tensor, by its header."""
        return self._files.entry(self.names[suffix]).shape

    def dtype(self, suffix: str) -> str:
        """The safetensors name of a tensor's type."""
        return self._files.entry(self.names[suffix]).dtype

    def load(self, suffix: str) -> Tensor:
        """A tensor that is there."""
        return self._files.load(self.names[suffix])

    def get(self, suffix: str) -> Tensor | None:
        """A tensor, or None."""
        return self.load(suffix) if suffix in self else None


@dataclass(frozen=True)
class CodeLayout:
    """A published layout of a weight's codes in several tensors.

    Args:
        required: suffixes of the tensors that every such weight has, after its module's name.
        optional: suffixes of tensors that change what the codes stand for, where they are there.
        shape: the weight's [out, in]. Raises ValueError for tensors that do not fit together.
        unpack: codes, scales and zeros of a weight of that shape. Raises ValueError.
        codes: the tensor that holds the codes, and the types that it may have.
        bits: bits of a code, as the shapes of the tensors have it; None if only the scheme has them.
        unused: suffixes of tensors that say how others compute, and nothing of the weight.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    shape: Callable[[StoredParts, "StoredScheme"], tuple[int, int]]
    unpack: Callable[[StoredParts, tuple[int, int], "StoredScheme"], UnpackedCodes]
    codes: tuple[str, tuple[str, ...]] = ("weight", ())
    bits: Callable[[StoredParts], int] | None = None
    unused: tuple[str, ...] = ()

    def is_of(self, parts: StoredParts) -> bool:
        """Whether a module's tensors are in this layout."""
        if not all(suffix in parts for suffix in self.required):
            return False
        suffix, dtypes = self.codes
        return not dtypes or parts.dtype(suffix) in dtypes


@dataclass(frozen=True)
class StoredScheme:
    """How weights are stored.

    Args:
        method: what quantized them, for messages.
        format: the format of the codes, a key of CODE_FORMATS.
        layout: their tensors.
        bits: bits of a stored code; None if each weight's tensors say it.
        zero_offset: what is taken off zeros when they are stored.
        block: rows and columns that share a scale; None if the scales' shape says it.
        activation: what tokens are rounded to: none, int8 or fp8; with a static scale in the checkpoint if is_static.
        is_symmetric: whether zeros are meant to be the middle of the range; then it does not matter by which of two
            conventions they are stored.
        said: where the bits are said, for messages.
    """

    method: str
    format: str
    layout: CodeLayout
    bits: int | None = None
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    activation: str = "none"
    is_static: bool = False
    is_symmetric: bool = False
    said: str = "quantization_config"


@dataclass(frozen=True)
class ModuleGroup:
    """The modules that share schemes.

    targets: as in compressed-tensors: names, regular expressions after `re:`, or the name of a class, which here
    stands for all. schemes: those that a module may have; the first whose layout its tensors are in is its own.
    """

    targets: tuple[str, ...]
    schemes: tuple[StoredScheme, ...]


@dataclass(frozen=True)
class StoredQuantization:
    """The quantization settings of a checkpoint. notes: for a build to print."""

    method: str
    groups: tuple[ModuleGroup, ...]
    notes: tuple[str, ...] = ()

    @property
    def schemes(self) -> Iterator[StoredScheme]:
        """The schemes of all groups."""
        return (scheme for group in self.groups for scheme in group.schemes)


def group_of(module: str, groups: Sequence[ModuleGroup]) -> ModuleGroup | None:
    """The group that names the module, else the first whose expression matches it, else one of a class."""

    def matches(target: str, kind: int) -> bool:
        if kind == 0:
            return target == module
        if target.startswith("re:"):
            return kind == 1 and re.match(target[3:], module) is not None
        return kind == 2 and "." not in target

    matching = (g for kind in range(3) for g in groups if any(matches(target, kind) for target in g.targets))
    return next(matching, None)
