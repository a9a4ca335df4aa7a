"""gpt-oss: experts with biases in MXFP4, sinks of attention, and a window in every second layer.

The model interleaves the rows of an expert's gate and up projections in one matrix; files have two matrices.
"""

from llmc.errors import CheckpointError
from llmc.frontends.gguf.container import GgufModel, GgufTensor
from llmc.frontends.gguf.description import Described, Sizes
from llmc.frontends.gguf.placement import ATTENTION, Names, Place
from llmc.frontends.gguf.rope import rotary_config

_LAYER = {
    **ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}


def gpt_oss(model: GgufModel, sizes: Sizes) -> Described:
    """The config and tensor names of gpt-oss. Its yarn bounds are not rounded to whole dimensions, as in OpenAI's
    code."""
    config = rotary_config(model, sizes, "gpt_oss", "GptOssForCausalLM")
    rope = config["rope_parameters"]
    config |= {
        "intermediate_size": sizes.hyper.whole("expert_feed_forward_length"),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
        "hidden_act": "silu",
        "num_local_experts": sizes.hyper.whole("expert_count"),
        "num_experts_per_tok": sizes.hyper.whole("expert_used_count"),
        "sliding_window": sizes.hyper.whole("attention.sliding_window"),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes.layers)],
        "attention_bias": True,
    }
    apart: dict[str, Place] = {}
    for layer in range(sizes.layers):
        apart |= _of_layer(model, layer)
    return Described(config, Names(_LAYER, apart=apart))


def _of_layer(model: GgufModel, layer: int) -> dict[str, Place]:
    """The sinks of its attention, and its experts."""
    ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
    gate, up, down = (f"{theirs}ffn_{part}_exps" for part in ("gate", "up", "down"))
    experts = f"{ours}mlp.experts."
    return {
        f"{ours}self_attn.sinks": Place(_tensor(model, f"{theirs}attn_sinks.weight", 1)),
        f"{experts}gate_up_proj": Place(
            _tensor(model, f"{gate}.weight", 3),
            between=_like(model, f"{up}.weight", f"{gate}.weight"),
            is_transposed=True,
        ),
        f"{experts}gate_up_proj_bias": Place(
            _tensor(model, f"{gate}.bias", 2), between=_like(model, f"{up}.bias", f"{gate}.bias")
        ),
        f"{experts}down_proj": Place(_tensor(model, f"{down}.weight", 3), is_transposed=True),
        f"{experts}down_proj_bias": Place(_tensor(model, f"{down}.bias", 2)),
    }


def _tensor(model: GgufModel, name: str, axes: int) -> GgufTensor:
    tensor = model.tensors.get(name)
    if tensor is None or len(tensor.shape) != axes:
        seen = "no" if tensor is None else f"{list(tensor.shape)} as"
        raise CheckpointError(
            f"the file has {seen} {name}, expected {axes} dimensions", at=model.path, fix="convert the model again"
        )
    return tensor


def _like(model: GgufModel, name: str, other: str) -> GgufTensor:
    """A tensor of the shape and type of another."""
    tensor, like = (_tensor(model, key, len(model.tensors[other].shape)) for key in (name, other))
    if (tensor.shape, tensor.type) != (like.shape, like.type):
        raise CheckpointError(
            f"{name} is {tensor.type.name} {list(tensor.shape)}, but {other} {like.type.name} {list(like.shape)}",
            at=model.path,
            fix="convert the model again, with one type for both",
        )
    return tensor
