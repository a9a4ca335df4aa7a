"""Decoder models written by hand in plain torch, the way users do: one with SDPA, one with eager attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB = 96
CONTEXT = 320


class SdpaAttention(nn.Module):
    """Causal self-attention by scaled_dot_product_attention, with one merged QKV projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width]."""
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return out


class EagerAttention(nn.Module):
    """The same by softmax over masked scores; the mask is a buffer."""

    bias: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(CONTEXT, CONTEXT)).view(1, 1, CONTEXT, CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width]."""
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = functional.softmax(scores, dim=-1) @ v
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return out


class Block(nn.Module):
    """A pre-norm transformer block with a GELU feed-forward network."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = attention
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width]."""
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.c_proj(self.gelu(self.c_fc(self.ln_2(x))))
        return out


class PlainDecoder(nn.Module):
    """Learned positions, blocks, tied output table; forward returns (logits, loss) as nanoGPT does."""

    def __init__(self, attention: type[SdpaAttention] | type[EagerAttention], width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, width)
        self.wpe = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width, attention(width, heads)) for _ in range(2)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """idx: [batch, tokens]; returns logits [batch, tokens, VOCAB] and the loss if there are targets."""
        _, t = idx.size()
        assert t <= CONTEXT, f"cannot forward {t} tokens, the context is {CONTEXT}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def sdpa_decoder() -> PlainDecoder:
    """A seeded decoder with SDPA."""
    return _seeded(SdpaAttention)


def eager_decoder() -> PlainDecoder:
    """A seeded decoder with eager masked attention; the same weights as sdpa_decoder."""
    return _seeded(EagerAttention)


def _seeded(attention: type[SdpaAttention] | type[EagerAttention]) -> PlainDecoder:
    model = PlainDecoder(attention)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Matrices keep the size of what goes through them; norm weights and biases move away from 1 and 0.
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))
    return model.eval()
