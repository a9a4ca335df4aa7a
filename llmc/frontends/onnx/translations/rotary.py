"""Rotary embedding from tables of cosines and sines: the operator, and as it is within attention."""

import torch
from torch import Tensor

from llmc.frontends.onnx.call import Call, Translated, Translations


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x by the angles of its positions.

    x: [T, heads, head_dim]; positions: [T]; cos, sin: [most positions, rotary / 2].
    """
    rows = [torch.nn.functional.embedding(positions, table) for table in (cos, sin)]
    turned: Tensor = torch.ops.llmc.rope.default(x, *rows, interleaved)
    return turned


def _microsoft(call: Call) -> Translated:
    call.unless(
        call.real("scale", 1.0) == 1 and not call.integer("is_packed_batching", 0), "it scales, or packs batches"
    )
    return _rotary(call, call.tensor(1), call.tensor(2), call.tensor(3))


def _standard(call: Call) -> Translated:
    call.unless(call.has(3), "its tables are made for each call: it has no position_ids")
    return _rotary(call, call.tensor(3), call.tensor(1), call.tensor(2))


def _rotary(call: Call, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, turned = call.tensor(0), bool(call.integer("interleaved", 0))
    call.unless(positions.dim() == 2, f"its positions are {list(positions.shape)}, expected a row a sequence")
    if x.dim() == 4:  # [1, heads, T, head_dim]
        by_token = x.squeeze(0).transpose(0, 1)
        return rotated(by_token, positions.squeeze(0), cos, sin, turned).transpose(0, 1).unsqueeze(0)
    call.unless(x.dim() == 3, f"it turns {list(x.shape)}")
    heads = call.integer("num_heads", 0)
    width = int(x.shape[2]) // heads if heads else 2 * int(cos.shape[1])
    by_token = x.squeeze(0).unflatten(-1, (-1, width))
    return rotated(by_token, positions.squeeze(0), cos, sin, turned).flatten(1).unsqueeze(0)


ROTARY: Translations = {
    ("", "RotaryEmbedding"): _standard,
    ("com.microsoft", "RotaryEmbedding"): _microsoft,
}
