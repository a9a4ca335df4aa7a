"""A DeepSeek-V3 with tiny sizes, and a decoder layer of it: seeded tensors, and what they compute, written plainly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.draft_checkpoints import INNER, VOCAB, WIDTH, normed, random_tensors
from tests.tiny_models import tiny_checkpoint

HEADS, PLAIN, TURNED, VALUE, RANK = 4, 16, 8, 12, 20
EXPERTS, CHOSEN, EXPERT_INNER, SCALE = 6, 2, 32, 2.5


def deepseek_checkpoint(directory: Path, **settings: Any) -> Path:
    """The model of two layers, of which the second has experts."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 320,
        "q_lora_rank": RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": PLAIN,
        "qk_rope_head_dim": TURNED,
        "v_head_dim": VALUE,
        "head_dim": TURNED,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": EXPERT_INNER,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": SCALE,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
        "pad_token_id": 2,
    }
    return tiny_checkpoint("deepseek_v3", directory, **{**sizes, **settings})


def layer_tensors(prefix: str, seed: int) -> dict[str, Tensor]:
    """Of one decoder layer with experts, by the names of DeepSeek's checkpoints."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_a_proj.weight": (RANK, WIDTH),
        "self_attn.q_a_layernorm.weight": (RANK,),
        "self_attn.q_b_proj.weight": (HEADS * (PLAIN + TURNED), RANK),
        "self_attn.kv_a_proj_with_mqa.weight": (RANK + TURNED, WIDTH),
        "self_attn.kv_a_layernorm.weight": (RANK,),
        "self_attn.kv_b_proj.weight": (HEADS * (PLAIN + VALUE), RANK),
        "self_attn.o_proj.weight": (WIDTH, HEADS * VALUE),
        "mlp.gate.weight": (EXPERTS, WIDTH),
        "mlp.gate.e_score_correction_bias": (EXPERTS,),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    for part in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_experts"):
        shapes |= {f"mlp.{part}.{name}_proj.weight": (EXPERT_INNER, WIDTH) for name in ("gate", "up")}
        shapes[f"mlp.{part}.down_proj.weight"] = (WIDTH, EXPERT_INNER)
    return random_tensors({prefix + name: size for name, size in shapes.items()}, seed)


def layer(x: Tensor, w: Mapping[str, Tensor], prefix: str) -> Tensor:
    """[T, WIDTH] after the layer. Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report", 2.1."""
    x = x + _attended(normed(x, w[f"{prefix}input_layernorm.weight"]), w, f"{prefix}self_attn.")
    return x + _of_experts(normed(x, w[f"{prefix}post_attention_layernorm.weight"]), w, f"{prefix}mlp.")


def _attended(x: Tensor, w: Mapping[str, Tensor], prefix: str) -> Tensor:
    def through(name: str, given: Tensor) -> Tensor:
        return given @ w[f"{prefix}{name}.weight"].T

    q = through("q_b_proj", normed(through("q_a_proj", x), w[f"{prefix}q_a_layernorm.weight"]))
    q = q.view(-1, HEADS, PLAIN + TURNED)
    latent = through("kv_a_proj_with_mqa", x)
    both = through("kv_b_proj", normed(latent[:, :RANK], w[f"{prefix}kv_a_layernorm.weight"]))
    k, v = both.view(-1, HEADS, PLAIN + VALUE).split((PLAIN, VALUE), dim=-1)
    turned_q, turned_k = _turned(q[..., PLAIN:]), _turned(latent[:, None, RANK:])
    scores = torch.einsum("qhd,khd->hqk", q[..., :PLAIN], k) + torch.einsum("qhd,kxd->hqk", turned_q, turned_k)
    scores = (scores * (PLAIN + TURNED) ** -0.5).masked_fill(torch.ones(len(x), len(x)).tril() == 0, float("-inf"))
    return through("o_proj", torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))


def _turned(x: Tensor) -> Tensor:
    """x: [T, heads, TURNED]; neighbouring channels turn by their position."""
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(TURNED // 2) / (TURNED // 2))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)


def _of_experts(x: Tensor, w: Mapping[str, Tensor], prefix: str) -> Tensor:
    def expert(part: str, given: Tensor) -> Tensor:
        gate, up, down = (w[f"{prefix}{part}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (silu(given @ gate.T) * (given @ up.T)) @ down.T

    scores = (x @ w[f"{prefix}gate.weight"].T).sigmoid()
    best = (scores + w[f"{prefix}gate.e_score_correction_bias"]).topk(CHOSEN).indices
    rows = []
    for row, chosen, shares in zip(x, best.tolist(), scores.gather(1, best), strict=True):
        weighed = SCALE * shares / shares.sum()
        rows.append(
            sum(share * expert(f"experts.{number}", row) for share, number in zip(weighed, chosen, strict=True))
        )
    return torch.stack([torch.as_tensor(row) for row in rows]) + expert("shared_experts", x)
