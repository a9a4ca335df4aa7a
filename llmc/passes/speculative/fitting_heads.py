"""Whether draft heads fit a model, and whether they go through its output matrix."""

from itertools import pairwise

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.graph.call_arguments import call_arguments
from llmc.graph.draft_records import PREFIX, MedusaCheckpoint
from llmc.graph.model_graph import ModelGraph
from llmc.passes.model_data import ModelData
from llmc.passes.speculative.projection import GATHER, Projection
from llmc.passes.uses import weight_value

# ‖theirs - ours‖ / ‖ours‖ of an output matrix that quantization has rounded, to four bits at the least.
_ROUNDED = 0.15
# Own output matrices, of the model's weights.
_MOST = 0.5
_TRAIN = "llmc train-medusa ENGINE --text FILE -o heads.safetensors"


def check_shapes(graph: ModelGraph, checkpoint: MedusaCheckpoint, projection: Projection) -> None:
    """Raise CheckpointError for heads of another model."""
    channels, vocabulary = int(projection.hidden.meta["val"].shape[-1]), graph.info.vocab_size
    model = graph.info.name
    for index, head in enumerate(checkpoint.heads):
        for block in head.blocks:
            _check(checkpoint, block.weight, (channels, channels), f"{model} has {channels} channels")
            if block.bias is not None:
                _check(checkpoint, block.bias, (channels,), f"{model} has {channels} channels")
        if (head.output is None) != (checkpoint.heads[0].output is None):
            raise CheckpointError(
                f"of heads 0 and {index} only one has its own output matrix",
                at=checkpoint.file,
                fix="download the whole checkpoint again",
            )
        if head.output is not None:
            places = vocabulary if checkpoint.token_map is None else checkpoint.source.shape(checkpoint.token_map)[0]
            why = f"{model} has {vocabulary} tokens" if checkpoint.token_map is None else f"token_map has {places}"
            _check(checkpoint, head.output, (places, channels), why)


def _check(checkpoint: MedusaCheckpoint, name: str, shape: tuple[int, ...], why: str) -> None:
    actual = checkpoint.source.shape(name)
    if actual != shape:
        raise CheckpointError(
            f"the heads' tensor {name!r} has shape {list(actual)}, expected {list(shape)}: {why}",
            at=checkpoint.file,
            fix=f"give heads that were trained for this model, or train some: {_TRAIN}",
        )


def shares_output(graph: ModelGraph, checkpoint: MedusaCheckpoint, projection: Projection, data: ModelData) -> bool:
    """Whether all heads go through the model's own output matrix.

    Raises CheckpointError for others that are too large, and for a token_map beyond the vocabulary.
    """
    outputs = tuple(dict.fromkeys(head.output for head in checkpoint.heads if head.output is not None))
    if not outputs:
        return True
    if checkpoint.token_map is None:
        ours = _whole(graph, projection, data)
        most = 0.0 if projection.weight.op == "placeholder" else _ROUNDED
        if all(_difference(data.source.load(PREFIX + name), ours) <= most for name in outputs):
            return True
    else:
        _check_token_map(graph, checkpoint, data.source.load(PREFIX + checkpoint.token_map))
    total = sum(int(node.meta["val"].numel()) for node in graph.weight_nodes())
    own = sum(torch.Size(checkpoint.source.shape(name)).numel() for name in outputs)
    if own > _MOST * total:
        raise CheckpointError(
            f"the heads' own output matrices have {own:,} weights, the whole model has {total:,}",
            at=checkpoint.file,
            fix=f"train heads that share the model's ({_TRAIN}), or give some with a truncated vocabulary (token_map)",
        )
    return False


def _check_token_map(graph: ModelGraph, checkpoint: MedusaCheckpoint, token_map: Tensor) -> None:
    low, high = int(token_map.min()), int(token_map.max())
    if token_map.is_floating_point() or low < 0 or high >= graph.info.vocab_size:
        raise CheckpointError(
            f"token_map names tokens from {low} to {high}, and {graph.info.name} has {graph.info.vocab_size}",
            at=checkpoint.file,
            fix=f"give heads that were trained for this model, or train some: {_TRAIN}",
        )


def _whole(graph: ModelGraph, projection: Projection, data: ModelData) -> Tensor:
    """The whole output matrix; each rank may hold some of its rows."""
    gathers = [node for node in projection.after if node.target is GATHER]
    if not gathers:
        whole: Tensor = weight_value(projection.weight, graph, data.source)
        return whole
    ends = [0, *weight_value(call_arguments(gathers[0])["ends"], graph, data.source).tolist()]
    parts = (weight_value(projection.weight, graph, data.source, rank) for rank in range(graph.ranks))
    return torch.cat([part[: end - start] for part, (start, end) in zip(parts, pairwise(ends), strict=True)])


def _difference(theirs: Tensor, ours: Tensor) -> float:
    """‖theirs - ours‖ / ‖ours‖."""
    theirs, ours = theirs.to(ours.dtype).float(), ours.float()
    return float(torch.linalg.vector_norm(theirs - ours) / torch.linalg.vector_norm(ours))
