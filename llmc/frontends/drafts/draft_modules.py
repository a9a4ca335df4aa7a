"""The layers that draft, as torch modules: from tokens, positions and hidden states to logits and hidden states.

Row i of a sequence reads token i + 1 and what the target knew after token i, and gives logits of token i + 2. Their own
hidden states take the target's place for tokens that are drafts themselves.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Eagle3FirstLayer(nn.Module):
    """A decoder layer whose attention reads an embedding and a hidden state side by side.

    layer: a layer of a transformers model; its q, k and v become products of twice the width. norm_before_residual: the
    normalized hidden state is what the attention's output is added to. Source: Li et al. 2025, "EAGLE-3".
    """

    def __init__(self, layer: Any, hidden_norm: nn.Module, width: int, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = hidden_norm
        self.norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(
                2 * width, narrow.out_features, narrow.bias is not None, narrow.weight.device, narrow.weight.dtype
            )
            setattr(self.self_attn, name, wide)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Run the layer. hidden_states: [1, T, 2 · width], the embeddings first. Returns [1, T, width]."""
        embedding, hidden = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(hidden)
        joined = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        attended, _ = self.self_attn(hidden_states=joined, **options)
        x = (normed if self.norm_before_residual else hidden) + attended
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Eagle3Draft(nn.Module):
    """An EAGLE-3 draft. embed_tokens: the embedding of the target's vocabulary. decoder: a transformers decoder that
    ends without a norm, its first layer an Eagle3FirstLayer. norm_output: hidden states go on normalized."""

    def __init__(
        self, embed_tokens: nn.Module, decoder: nn.Module, norm: nn.Module, lm_head: nn.Module, *, norm_output: bool
    ) -> None:
        super().__init__()
        self.embed_tokens, self.decoder, self.norm, self.lm_head = embed_tokens, decoder, norm, lm_head
        self.norm_output = norm_output

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the draft.

        input_ids, positions: [1, T]; hidden: [1, T, width], fp32. Returns logits [1, T, draft vocabulary] and
        hidden states of the model's dtype.
        """
        embedding = self.embed_tokens(input_ids)
        joined = torch.cat((embedding, hidden.to(embedding.dtype)), dim=-1)
        x = self.decoder(inputs_embeds=joined, position_ids=positions, use_cache=False).last_hidden_state
        normed = self.norm(x)
        return self.lm_head(normed), normed if self.norm_output else x


class MtpDraft(nn.Module):
    """One layer of the target's kind, and its norm, over an embedding and a hidden state that are made one.

    decoder: a transformers decoder of that layer. Its normalized output gives the logits and goes on as hidden state.
    Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report".
    """

    def __init__(
        self,
        embed_tokens: nn.Module,
        embedding_norm: nn.Module,
        hidden_norm: nn.Module,
        projection: nn.Linear,
        decoder: nn.Module,
        lm_head: nn.Module,
    ) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head, self.decoder = embed_tokens, lm_head, decoder
        self.embedding_norm, self.hidden_norm, self.projection = embedding_norm, hidden_norm, projection

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.embed_tokens(input_ids)
        normed = (self.embedding_norm(embedding), self.hidden_norm(hidden.to(embedding.dtype)))
        x = self.projection(torch.cat(normed, dim=-1))
        x = self.decoder(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state
        return self.lm_head(x), x
