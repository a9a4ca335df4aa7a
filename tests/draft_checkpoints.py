"""Synthetic drafts of all layouts with seeded weights, and what they compute, written plainly: the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

# As tests/tiny_models.py makes a llama.
WIDTH, HEADS, KV_HEADS, INNER, VOCAB = 64, 4, 2, 112, 160
EPS = 1e-6
DRAFT_VOCAB = 48


@dataclass(frozen=True)
class Shape:
    """Of a draft's decoder layer. head_dim may be another than width / heads."""

    head_dim: int = 16
    query_norm: bool = False


def config(model_type: str = "llama", **more: Any) -> dict[str, Any]:
    """A decoder config of one layer."""
    return {
        "model_type": model_type,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **more,
    }


def layer_tensors(prefix: str, seed: int, *, reads: int = WIDTH, shape: Shape = Shape()) -> dict[str, Tensor]:
    """Of one decoder layer. reads: columns of its q, k and v."""
    rows = shape.head_dim * HEADS, shape.head_dim * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (rows[0], reads),
        "self_attn.k_proj": (rows[1], reads),
        "self_attn.v_proj": (rows[1], reads),
        "self_attn.o_proj": (WIDTH, rows[0]),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    if shape.query_norm:
        shapes |= {"self_attn.q_norm": (shape.head_dim,), "self_attn.k_norm": (shape.head_dim,)}
    return random_tensors({f"{prefix}{name}.weight": size for name, size in shapes.items()}, seed)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Matrices that keep the size of what goes through them, vectors around 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, size in shapes.items():
        noise = torch.randn(size, generator=generator)
        tensors[name] = noise * 1.5 * size[-1] ** -0.5 if len(size) > 1 else 1 + 0.2 * noise
    return tensors


def vocabulary_map(seed: int = 3) -> dict[str, Tensor]:
    """d2t and t2d of DRAFT_VOCAB of the target's tokens."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    kept[ids] = True
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": kept}


def write(directory: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A directory of config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def eagle3(directory: Path, *, taps: int = 3, **settings: Any) -> Path:
    """In the layout of EAGLE's authors."""
    tensors = layer_tensors("midlayer.", 11, reads=2 * WIDTH) | vocabulary_map()
    tensors |= random_tensors(
        {
            "midlayer.hidden_norm.weight": (WIDTH,),
            "fc.weight": (WIDTH, taps * WIDTH),
            "norm.weight": (WIDTH,),
            "lm_head.weight": (DRAFT_VOCAB, WIDTH),
        },
        12,
    )
    return write(directory, config(draft_vocab_size=DRAFT_VOCAB, **settings), tensors)


def speculators(directory: Path, *, taps: int = 3, model_type: str = "qwen3", **settings: Any) -> Path:
    """In the layout of speculators, with its own embeddings."""
    shape = Shape(query_norm=model_type == "qwen3")
    tensors = layer_tensors("layers.0.", 21, reads=2 * WIDTH, shape=shape) | vocabulary_map()
    shapes: dict[str, tuple[int, ...]] = {
        "layers.0.hidden_norm.weight": (WIDTH,),
        "fc.weight": (WIDTH, taps * WIDTH),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (DRAFT_VOCAB, WIDTH),
        "embed_tokens.weight": (VOCAB, WIDTH),
    }
    if settings.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * WIDTH,)
    if settings.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (WIDTH,) for i in range(taps)}
    whole = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "transformer_layer_config": config(model_type),
        **settings,
    }
    return write(directory, whole, tensors | random_tensors(shapes, 22))


QWEN = {"embedding": "mtp.pre_fc_norm_embedding", "hidden": "mtp.pre_fc_norm_hidden", "both": "mtp.fc"}


def add_qwen_mtp(model: Path, drafting: int = 1) -> Path:
    """Give a checkpoint so many layers as Qwen's."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{QWEN['embedding']}.weight": (WIDTH,),
        f"{QWEN['hidden']}.weight": (WIDTH,),
        f"{QWEN['both']}.weight": (WIDTH, 2 * WIDTH),
        "mtp.norm.weight": (WIDTH,),
    }
    layers = [layer_tensors(f"mtp.layers.{number}.", 31 + 10 * number) for number in range(drafting)]
    return added(model, dict(item for layer in layers for item in layer.items()) | random_tensors(shapes, 32))


def add_deepseek_mtp(
    model: Path,
    number: int = 2,
    layer: Callable[[str, int], dict[str, Tensor]] = layer_tensors,
) -> Path:
    """Give a checkpoint a layer of this number as DeepSeek's, with an output matrix of its own. layer: the tensors of
    the decoder layer in it, by their prefix and a seed."""
    prefix = f"model.layers.{number}."
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}enorm.weight": (WIDTH,),
        f"{prefix}hnorm.weight": (WIDTH,),
        f"{prefix}eh_proj.weight": (WIDTH, 2 * WIDTH),
        f"{prefix}shared_head.norm.weight": (WIDTH,),
        f"{prefix}shared_head.head.weight": (VOCAB, WIDTH),
    }
    return added(model, layer(prefix, 41 + 10 * number) | random_tensors(shapes, 42 + 10 * number))


def deepseek_names(number: int) -> dict[str, str]:
    """For `mtp_logits`."""
    prefix = f"model.layers.{number}."
    names = {"embedding": "enorm", "hidden": "hnorm", "both": "eh_proj", "layer": "", "norm": "shared_head.norm"}
    return {name: prefix + tensor for name, tensor in names.items()}


def added(model: Path, tensors: Mapping[str, Tensor]) -> Path:
    """The checkpoint with these tensors beside its own."""
    file = model / "model.safetensors"
    save_file(load_file(file) | {name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return model


# ---- what they compute ---------------------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x: [T, heads, head_dim]; the halves of each head turn by its position."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def attended(x: Tensor, w: Mapping[str, Tensor], prefix: str, positions: Tensor, head_dim: int = 16) -> Tensor:
    """Causal attention of a layer over normalized x: [T, reads]."""
    q, k, v = (x @ w[f"{prefix}self_attn.{n}_proj.weight"].T for n in "qkv")
    q, k, v = q.view(-1, HEADS, head_dim), k.view(-1, KV_HEADS, head_dim), v.view(-1, KV_HEADS, head_dim)
    if f"{prefix}self_attn.q_norm.weight" in w:
        q = normed(q, w[f"{prefix}self_attn.q_norm.weight"])
        k = normed(k, w[f"{prefix}self_attn.k_norm.weight"])
    q, k = rotated(q, positions), rotated(k, positions)
    k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).tril() == 0, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return out @ w[f"{prefix}self_attn.o_proj.weight"].T


def after_attention(x: Tensor, w: Mapping[str, Tensor], prefix: str) -> Tensor:
    """The second half of a layer."""
    y = normed(x, w[f"{prefix}post_attention_layernorm.weight"])
    inner = silu(y @ w[f"{prefix}mlp.gate_proj.weight"].T) * (y @ w[f"{prefix}mlp.up_proj.weight"].T)
    return x + inner @ w[f"{prefix}mlp.down_proj.weight"].T


def eagle3_logits(
    w: Mapping[str, Tensor], ids: Tensor, hidden: Tensor, embeddings: Tensor, settings: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Logits over the draft's vocabulary and hidden states of a whole sequence. hidden: [T, WIDTH], combined."""
    prefix = "midlayer." if "midlayer.input_layernorm.weight" in w else "layers.0."
    positions = torch.arange(len(ids))
    state = normed(hidden, w[f"{prefix}hidden_norm.weight"])
    residual = state if settings.get("norm_before_residual") else hidden
    both = torch.cat((normed(embeddings[ids], w[f"{prefix}input_layernorm.weight"]), state), dim=-1)
    x = after_attention(residual + attended(both, w, prefix, positions), w, prefix)
    out = normed(x, w["norm.weight"])
    return out @ w["lm_head.weight"].T, out if settings.get("norm_output") else x


def combined(w: Mapping[str, Tensor], taps: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """[T, taps · WIDTH] to [T, WIDTH]."""
    if settings.get("norm_before_fc"):
        taps = normed(taps, w["input_norm.weight"])
    if settings.get("fc_norm"):
        parts = taps.split(WIDTH, dim=-1)
        taps = torch.cat([normed(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], dim=-1)
    return taps @ w["fc.weight"].T


def mtp_logits(
    w: Mapping[str, Tensor],
    names: Mapping[str, str],
    ids: Tensor,
    hidden: Tensor,
    embeddings: Tensor,
    output: Tensor,
    layer: Callable[[Tensor, Mapping[str, Tensor], str], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Of an MTP layer. names: of its norms, its projection, its layer and its last norm. layer: what the decoder layer
    makes of [T, WIDTH] with the tensors of a prefix; a Llama's by default."""
    parts = (normed(embeddings[ids], w[f"{names['embedding']}.weight"]), normed(hidden, w[f"{names['hidden']}.weight"]))
    x = torch.cat(parts, dim=-1) @ w[f"{names['both']}.weight"].T
    out = normed((layer or llama_layer)(x, w, names["layer"]), w[f"{names['norm']}.weight"])
    return out @ output.T, out


def llama_layer(x: Tensor, w: Mapping[str, Tensor], prefix: str) -> Tensor:
    """[T, WIDTH] after a decoder layer."""
    x = x + attended(normed(x, w[f"{prefix}input_layernorm.weight"]), w, prefix, torch.arange(len(x)))
    return after_attention(x, w, prefix)
