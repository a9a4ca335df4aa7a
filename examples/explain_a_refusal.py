"""Explain why a norm was not fused: the second norm's normalized values are read once more, before its weight.

    python examples/explain_a_refusal.py

The same for a model directory: llmc explain MODEL.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmc.debug.explain_model import explain_model
from llmc.frontends.capture import capture
from llmc.options import BuildOptions
from llmc.passes import default
from llmc.report.explanation import Explanation

WIDTH, HEADS, VOCABULARY = 32, 2, 64


class RmsNorm(nn.Module):
    """As most people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normalized x, with and without the weight."""
        normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normalized, normalized


class Model(nn.Module):
    """One attention and one product; `normalized` of the second norm gets a second reader."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.norm1, self.norm2 = RmsNorm(), RmsNorm()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y, _ = self.norm1(x)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y, normalized = self.norm2(x)
        logits: Tensor = self.head(y + torch.tanh(normalized))  # This is the extra user.
        return logits


def explain() -> Explanation:
    torch.manual_seed(0)
    options = BuildOptions()
    return explain_model(capture(Model().eval(), options), default(), options)


def main() -> None:
    explanation = explain()
    for coverage in explanation.coverage:
        print(coverage)
    for record in explanation.passes:
        for refusal in record.refusals:
            print(f"\n{record.name} left {refusal.node} alone: {refusal.reason}")
            print(f"  expected: {refusal.expected}\n  found:    {refusal.found}\n  at:       {refusal.source}")
            for user in refusal.users:
                mark = "  <- in the way" if user.name in refusal.extra_users else ""
                print(f"  used by:  {user.name}: {user.type} = {user.op}, {user.source}{mark}")


if __name__ == "__main__":
    main()
