"""Where a model's tensors, by their names in transformers, are in a GGUF file, and what undoes its converter's work."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from llmc.errors import CheckpointError
from llmc.frontends.gguf.container import GgufModel, GgufTensor


@dataclass(frozen=True)
class Place:
    """A tensor of the file, or a part of one.

    heads: how many the rows have, where pairs that are rotated together are adjacent and belong half a head apart.
    expert: which of a tensor's. less: what the converter added to it. as_row: [n] is [1, n] to the model. between: a
    tensor like it, each of whose rows follows one of its rows. is_transposed: [experts, out, in] is [experts, in, out]
    to the model.
    """

    tensor: GgufTensor
    heads: int | None = None
    expert: int | None = None
    less: float = 0.0
    as_row: bool = False
    between: GgufTensor | None = None
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the model."""
        shape = self.rows_shape
        return (shape[0], shape[2], shape[1]) if self.is_transposed else shape

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """The shape with the columns last, as they are stored."""
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        if self.between is not None:
            shape = (shape[0], 2 * shape[1], *shape[2:])
        return (1, *shape) if self.as_row else shape

    @property
    def nbytes(self) -> int:
        """The tensor's size in the file, in bytes."""
        times = 1 if self.between is None else 2
        return times * self.tensor.nbytes // (1 if self.expert is None else self.tensor.shape[0])


# Names in the file by those in transformers: outside of layers and inside, without `.weight` and `.bias`.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
GATED = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
ROUTED = {"ffn_norm": GATED["ffn_norm"], "ffn_gate_inp": "mlp.gate"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Names:
    """The names of a family's tensors. layer: names within layers. experts: tensors with a matrix per expert; `{}`
    stands for its number. rotated: number of heads of tensors with adjacent rotary pairs. norms_less: the offset that
    GGUF adds to norm weights. rows: vectors that are one-row matrices in the model. read_apart: tensors that are read
    separately. apart: by the model's names, tensors that do not follow the names of a module's weight and bias."""

    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    rotated: Mapping[str, int] = field(default_factory=dict)
    norms_less: float = 0.0
    rows: Iterable[str] = ()
    read_apart: Iterable[str] = ()
    apart: Mapping[str, Place] = field(default_factory=dict)


_IN_LAYER = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<part>\w+)\.(?P<suffix>weight|bias)")
_OUTSIDE = re.compile(r"(?P<part>\w+)\.(?P<suffix>weight|bias)")


def placed(model: GgufModel, names: Names, layers: int) -> dict[str, Place]:
    """Return every tensor of the file by the model's name. Raises CheckpointError for one that the family does not
    have."""
    places = dict(names.apart)
    read = {stored.name for place in places.values() for stored in (place.tensor, place.between) if stored is not None}
    read.update(names.read_apart)
    for name, tensor in model.tensors.items():
        if name in read:
            continue
        match, prefix, known = _IN_LAYER.fullmatch(name), "", OUTSIDE
        if match is not None and int(match["layer"]) < layers:
            prefix, known = f"model.layers.{int(match['layer'])}.", {**names.layer, **names.experts}
        else:
            match = _OUTSIDE.fullmatch(name)
        part = None if match is None else known.get(match["part"])
        if match is None or part is None:
            raise CheckpointError(
                f"tensor {name!r:.80} does not belong to this architecture, which has {layers} layers of "
                f"{', '.join((*names.layer, *names.experts))}",
                at=tensor.file,
                fix="build from the safetensors checkpoint that the file was converted from",
            )
        ours, suffix = match["part"], match["suffix"]
        if ours in names.experts:
            for expert in range(_experts(tensor, suffix)):
                places[f"{prefix}{part.format(expert)}.{suffix}"] = Place(tensor, expert=expert)
            continue
        heads, is_norm = names.rotated.get(ours), ours.endswith("norm")
        if heads is not None and tensor.shape[0] % (2 * heads):
            raise CheckpointError(
                f"tensor {name} has {tensor.shape[0]} rows, which {heads} heads of pairs do not divide",
                at=tensor.file,
                fix="convert the model again",
            )
        less = names.norms_less if is_norm else 0.0
        places[f"{prefix}{part}.{suffix}"] = Place(tensor, heads, None, less, as_row=ours in names.rows)
    return places


def _experts(tensor: GgufTensor, suffix: str) -> int:
    axes = 3 if suffix == "weight" else 2
    if len(tensor.shape) != axes:
        raise CheckpointError(
            f"tensor {tensor.name} of experts has shape {list(tensor.shape)}, expected {axes} dimensions",
            at=tensor.file,
            fix="convert the model again",
        )
    return tensor.shape[0]
