"""The second opinion: a graph of any stage, exported and run by onnxruntime with its independent kernels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmc.codegen.onnx.installed import require_onnx
from llmc.engine_format.engine_kinds import MODEL_NAME
from llmc.files.scratch_directory import ScratchDirectory
from llmc.graph.execute import sequence_inputs, uncut_sizes
from llmc.graph.model_graph import ModelGraph
from llmc.graph.weights import WeightSource
from llmc.program import LOGITS, WRITTEN


def nothing(amount: int) -> None:
    """A progress callback that does nothing."""


class OnnxOracle:
    """A graph in an onnxruntime session on the CPU. Raises LoweringError for ops that standard ONNX ops cannot
    express."""

    def __init__(self, graph: ModelGraph, source: WeightSource) -> None:
        require_onnx("oracle=onnxruntime", "onnxruntime")
        import onnxruntime

        from llmc.codegen.onnx.model_files import write_model_files

        self._graph = graph
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # Log errors only.
        with ScratchDirectory() as directory:
            write_model_files(graph, source, directory, nothing)
            self._session = onnxruntime.InferenceSession(
                str(Path(directory, MODEL_NAME)), options, providers=["CPUExecutionProvider"]
            )
        self._inputs = {input_.name for input_ in self._session.get_inputs()}
        self._outputs = [output.name for output in self._session.get_outputs()]

    def logits(self, token_ids: Sequence[int], *, chunk_sizes: Sequence[int] = (), block_size: int = 16) -> Tensor:
        """[tokens, vocabulary], fp32. chunk_sizes: the sizes of the steps of a graph with caches, in tokens; by default
        one step."""
        chunks = uncut_sizes(self._graph, chunk_sizes or (len(token_ids),))
        parts, caches = [], dict[str, Any]()
        for step in sequence_inputs(self._graph, token_ids, chunk_sizes=chunks, block_size=block_size):
            arrays = {name: value.numpy() for name, value in step.items() if name in self._inputs}
            results = dict(zip(self._outputs, self._session.run(None, arrays | caches), strict=True))
            caches = {n.removesuffix(WRITTEN): v for n, v in results.items() if n.endswith(WRITTEN)}
            parts.append(torch.from_numpy(results[LOGITS]))
        logits = torch.cat(parts, dim=parts[0].dim() - 2)
        return logits if logits.dim() == 2 else logits[0]
