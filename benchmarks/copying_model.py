"""A Llama of two layers that copies: its weights are computed, not trained.

After a token that it has read before, it says the token that followed then. Layer 0 writes to each position the token
before it: queries and keys are constants, and rotations make their product largest at a distance of one. Layer 1 looks
for the positions whose token before is the current token (an induction head; Olsson et al. 2022), and copies what
stands there. Its queries and keys use the slowest rotations only, so distance does not matter to it. A token that is
new attends to the first position, as heads of trained models do (an attention sink).

If it says a wrong token, the keys and values of the right one are gone. Perplexity of prose hides that, because most
tokens follow from the nearest ones.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

VOCABULARY = 4096
# Begins every text.
BEGINNING = 0
# Channels of a token; the hidden state has the token, the one before, the one to say, and a constant.
_TOKEN = 64
_CURRENT, _BEFORE, _SAID = (slice(part * _TOKEN, (part + 1) * _TOKEN) for part in range(3))
_HIDDEN, _CONSTANT, _IS_BEGINNING = 256, 3 * _TOKEN, 3 * _TOKEN + 1
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 64
# Rotations slow down by 10^0.625 from one pair of channels to the next: after the first pairs they stand still.
_THETA, _FAST = 1e20, 8
# Logits of a match, and those of the position before. Other positions have a third less.
_MATCH, _NEAREST = (30.0, 60.0), 240.0
# The logit of the first position, as a share of a match's.
_SINK = 0.7


def save_copying_model(directory: Path) -> None:
    """Write the model as a Hugging Face directory. Its tokens have no text."""
    copying_model().save_pretrained(directory)


@torch.no_grad()
def copying_model() -> LlamaForCausalLM:
    """The model, in fp32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.zero_()
    chance = torch.Generator().manual_seed(0)
    tokens = torch.nn.functional.normalize(torch.randn(VOCABULARY, _TOKEN, generator=chance), dim=1)
    body = model.model
    body.embed_tokens.weight[:, _CURRENT] = tokens
    body.embed_tokens.weight[:, _CONSTANT] = 1.0
    body.embed_tokens.weight[BEGINNING, _IS_BEGINNING] = 1.0
    model.lm_head.weight[:, _SAID] = tokens
    # A norm divides by the root mean square, which all tokens share; its weight undoes that.
    for norm, squares in ((body.layers[0].input_layernorm, 2.0), (body.layers[1].input_layernorm, 3.0)):
        norm.weight.fill_(math.sqrt(squares / _HIDDEN))
    body.norm.weight.fill_(1.0)
    _look_one_back(body.layers[0].self_attn)
    _look_for_the_same(body.layers[1].self_attn, chance)
    return model


def _look_one_back(attention: LlamaAttention) -> None:
    """Each head's query and key are constants, turned against each other by one position."""
    pairs, half = torch.arange(_FAST), _HEAD_DIM // 2
    angles = _THETA ** (-2.0 * pairs.double() / _HEAD_DIM)
    size = math.sqrt(_NEAREST * math.sqrt(_HEAD_DIM) / _FAST)
    query, key = torch.zeros(_HEAD_DIM), torch.zeros(_HEAD_DIM)
    key[pairs] = size
    query[pairs], query[pairs + half] = size * angles.cos().float(), -size * angles.sin().float()
    _heads(attention.q_proj)[:, :, _CONSTANT] = query
    _heads(attention.k_proj)[:, :, _CONSTANT] = key
    _copy(attention, _BEFORE)


def _look_for_the_same(attention: LlamaAttention, chance: torch.Generator) -> None:
    """Each KV head compares tokens by channels of its own, and two query heads by two degrees of sharpness."""
    half = _HEAD_DIM // 2
    slow = torch.tensor([place for place in range(_HEAD_DIM) if place % half > _FAST])
    for head in range(_KV_HEADS):
        mixed, _ = torch.linalg.qr(torch.randn(_TOKEN, _TOKEN, generator=chance))
        compared = mixed[: len(slow)] * math.sqrt(_TOKEN / len(slow))
        _heads(attention.k_proj)[head, slow, _BEFORE] = compared
        _heads(attention.k_proj)[head, _FAST, _IS_BEGINNING] = 1.0
        for each, match in enumerate(_MATCH):
            query, size = head * len(_MATCH) + each, match * math.sqrt(_HEAD_DIM)
            _heads(attention.q_proj)[query, slow, _CURRENT] = compared * size
            _heads(attention.q_proj)[query, _FAST, _CONSTANT] = _SINK * size
    _copy(attention, _SAID)


def _copy(attention: LlamaAttention, into: slice) -> None:
    """Values are the tokens; their mean over the heads goes to some channels."""
    _heads(attention.v_proj)[:, :, _CURRENT] = torch.eye(_HEAD_DIM)
    for head in range(_HEADS):
        columns = slice(head * _HEAD_DIM, (head + 1) * _HEAD_DIM)
        attention.o_proj.weight[into, columns] = torch.eye(_HEAD_DIM) / _HEADS


def _heads(projection: torch.nn.Linear) -> Tensor:
    """A view of its weight: [heads, head_dim, hidden]."""
    assert isinstance(projection, torch.nn.Linear)
    return projection.weight.view(-1, _HEAD_DIM, _HIDDEN)
