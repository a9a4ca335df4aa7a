"""The tensors of an ONNX file as a WeightSource: by the names of its initializers, read one at a time."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.formats.code_format import CODE_PARTS
from llmc.frontends.onnx.coded_tensor import CodedTensor
from llmc.frontends.onnx.codes import coded_tensors, unpacked
from llmc.frontends.onnx.files import describing, genai_settings
from llmc.frontends.onnx.head_norms import heads_apart
from llmc.frontends.onnx.interface import Interface, read_interface
from llmc.frontends.onnx.model import OnnxGraph, OnnxModel, read_model
from llmc.frontends.onnx.needed import needed_graph
from llmc.frontends.onnx.operators import check_expansion, check_operators
from llmc.frontends.onnx.tensors import OnnxTensor
from llmc.graph.stored_codes import RoundedAgain, StoredWeight, UnpackedCodes


@dataclass(frozen=True)
class ParsedFile:
    """A file without the data of its tensors.

    Args:
        settings: The settings of the model in genai_config.json.
        graph: The part of the model's graph that logits need.
        coded: The weights that are codes, by the names that the graph has for their numbers.
    """

    model: OnnxModel
    settings: dict[str, Any]
    interface: Interface
    graph: OnnxGraph
    coded: dict[str, CodedTensor]


def parsed_file(file: Path) -> ParsedFile:
    """Parse an ONNX file. Raises CheckpointError for a damaged file, CaptureError for a model that is not a decoder or
    needs unsupported operators."""
    model = read_model(file)
    settings = genai_settings(describing(file))
    interface = read_interface(model.graph, file, _head_dim(settings))
    graph = heads_apart(needed_graph(model, interface.logits))
    check_operators(model, graph.nodes)
    check_expansion(model, graph.nodes)
    return ParsedFile(model, settings, interface, graph, coded_tensors(graph, model.functions))


def _head_dim(settings: dict[str, Any]) -> int | None:
    decoder = settings.get("decoder")
    size = decoder.get("head_size") if isinstance(decoder, dict) else None
    return size if isinstance(size, int) and 0 < size < 1 << 16 else None


class OnnxSource:
    """The tensors of an ONNX file; a CodeSource."""

    def __init__(self, file: Path) -> None:
        self.file, self.parsed = file, parsed_file(file)
        self._tensors, self._coded = self.parsed.graph.tensors, self.parsed.coded
        # Codes, scales and zeros of one weight are requested consecutively.
        self._unpacked = functools.lru_cache(maxsize=1)(lambda name: unpacked(self._coded[name]))

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is codes."""
        return bool(self._coded)

    @property
    def gives_way(self) -> bool:
        """False: codes stay as they are, whatever `quantize` says of other weights."""
        return False

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, sorted; parts of codes are not among them."""
        parts = {part.name for coded in self._coded.values() for part in coded.parts}
        return tuple(sorted((self._tensors.keys() - parts) | self._coded.keys()))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; for codes, that of the weight."""
        coded = self._coded.get(name)
        return self._tensor(name).shape if coded is None else (coded.rows, coded.columns)

    def weight(self, name: str) -> StoredWeight | None:
        """Return how a weight's codes are stored; None if it is stored as numbers."""
        coded = self._coded.get(name)
        if coded is None:
            return None
        return StoredWeight(name, (coded.rows, coded.columns), coded.op, coded.format)

    def rounded(self, name: str) -> RoundedAgain | None:
        """Return None, because all operators that are read have codes."""

    def are_alike(self, names: Sequence[str]) -> bool:
        """False: experts are already in one tensor."""
        return False

    def unpacked(self, name: str) -> UnpackedCodes:
        """Return all parts of a weight of codes."""
        return self._unpacked(name)

    def input_scale(self, name: str) -> Tensor | None:
        """Return None, because no operator that is read rounds activations by a stored scale."""

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU: numbers in fp32 if it is codes, or the part of those that is named after `::`."""
        base, _, part = name.rpartition("::")
        if base in self._coded and part in CODE_PARTS:
            values: Tensor | None = getattr(self._unpacked(base), part)
            if values is None:
                raise CheckpointError(f"weight {base!r:.80} has no {part}", at=self.file, fix="build the model again")
            return values
        coded = self._coded.get(name)
        return self._tensor(name).load() if coded is None else self._unpacked(name).values(coded.format)

    def dtype(self) -> torch.dtype:
        """The floating-point dtype in which most elements that are not codes are stored. Raises CheckpointError."""
        elements = Counter[torch.dtype]()
        for tensor in self._tensors.values():
            if tensor.dtype.is_floating_point:
                elements[tensor.dtype] += tensor.numel
        if not elements:
            raise CheckpointError(
                "the model holds no floating-point tensor", at=self.file, fix="name a decoder's .onnx file"
            )
        return elements.most_common(1)[0][0]

    def _tensor(self, name: str) -> OnnxTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"the file has no tensor {name!r:.80} ({len(self._tensors)} tensors found)",
                at=self.file,
                fix="build the model again: the file has changed",
            )
        return tensor
