"""The rows that published algorithms keep, from plain notes of what the caches of a model hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from llmc.ops.rope import rotate
from llmc.program import H2O, Compactor, Cut, Lru, Scored, SnapKV, TriAttention
from tests.ops import test_score_expected as triattention
from tests.ops import test_score_leverage as compactor
from tests.ops.test_row_choices import published


@dataclass
class Noted:
    """Notes of one layer. Positions are those of the sequence; rows are those of its cache.

    Args:
        inv_freq: Frequencies of the keys' rotation, [channels / 2].
        expected: Queries of a calibration text before their rotation, [tokens, heads, channels]; empty for none.
        queries: Rotated queries, of the last positions at least, [positions, heads, channels].
        pairs: Keys and values of all positions as they are stored, [kv_heads, positions, channels] each.
        held: Positions of the rows, [kv_heads, rows].
        paid: The attention that each query has paid to each row, averaged over the query heads of a KV head, [kv_heads,
            positions, rows].
        uses: For each KV head and block the number of tokens at its last use, and the attention that it got then.
    """

    inv_freq: Tensor
    expected: Tensor
    queries: Tensor
    pairs: tuple[Tensor, Tensor]
    held: Tensor
    paid: Tensor
    uses: list[list[float]] = field(default_factory=list)

    @staticmethod
    def empty(heads: int, kv_heads: int, channels: int, inv_freq: Tensor, expected: Tensor) -> Noted:
        """Notes of a layer whose cache is empty."""
        pair = torch.zeros(kv_heads, 0, channels), torch.zeros(kv_heads, 0, channels)
        held, paid = torch.zeros(kv_heads, 0, dtype=torch.long), torch.zeros(kv_heads, 0, 0)
        return Noted(inv_freq, expected, torch.zeros(0, heads, channels), pair, held, paid)

    def add(self, queries: Tensor, keys: Tensor, values: Tensor, paid: Tensor) -> None:
        """Note new positions.

        Args:
            queries: [tokens, heads, channels].
            keys, values: [kv_heads, tokens, channels].
            paid: By new queries, [kv_heads, queries, rows].
        """
        heads, before, rows = len(self.held), self.pairs[0].shape[1], self.held.shape[1] + keys.shape[1]
        self.queries = torch.cat((self.queries, queries))
        self.pairs = torch.cat((self.pairs[0], keys), dim=1), torch.cat((self.pairs[1], values), dim=1)
        places = torch.arange(before, before + keys.shape[1]).expand(heads, -1)
        self.held = torch.cat((self.held, places), dim=1)
        old = torch.nn.functional.pad(self.paid, (0, rows - self.paid.shape[2]))
        self.paid = torch.cat((old, paid), dim=1)

    def use(self, policy: Lru, end: int) -> None:
        """Note uses at an update. end: tokens of the sequence then."""
        rows = self.held.shape[1]
        paid = self.paid[:, end - policy.every : end].mean(1)
        old, self.uses = self.uses or [[] for _ in paid], []
        for head, before in zip(paid.tolist(), old, strict=True):
            uses = list[float]()
            for block in range(rows // policy.block):
                share = sum(head[block * policy.block : (block + 1) * policy.block])
                is_new = block >= len(before)
                uses.append(end + share if is_new or share >= policy.block / rows else before[block])
            self.uses.append(uses)

    def keep(self, best: Tensor, block: int) -> None:
        """Drop all other rows. best: [kv_heads, rows]."""
        self.held = self.held.gather(1, best)
        self.paid = self.paid.gather(2, best[:, None].expand(-1, self.paid.shape[1], -1))
        firsts = (best[:, ::block] // block).tolist()
        self.uses = [[own[i] for i in head] for own, head in zip(self.uses, firsts, strict=bool(self.uses))]


def chosen_rows(policy: Scored, layers: Sequence[Noted], cut: Cut, prompt: int) -> list[Tensor]:
    """The rows of each layer and KV head with the highest scores, and those that are protected: [kv_heads, kept]."""
    end = layers[0].pairs[0].shape[1]
    chunks = [range(*each) for each in pairwise([0, *policy.cuts(end + 1, prompt)])]
    of_layers = [_scores(policy, layer, cut, chunks) for layer in layers]
    if isinstance(policy, TriAttention):
        of_layers = _joined(policy, torch.stack(of_layers))
    return [best_rows(scores, cut.chosen, policy.sinks, policy.recent) for scores in of_layers]


def best_rows(scores: Tensor, kept: int, sinks: int, recent: int = 0) -> Tensor:
    """The rows with the highest scores, in order; of equal ones the first. scores: [kv_heads, rows]; returns [kv_heads,
    kept]."""
    found = scores.clone()
    found[:, :sinks] = float("inf")
    found[:, found.shape[1] - recent :] = float("inf")
    return found.sort(dim=-1, descending=True, stable=True).indices[:, :kept].sort(-1).values


def _scores(policy: Scored, noted: Noted, cut: Cut, chunks: list[range]) -> Tensor:
    """Of all rows, by KV head, as published. chunks: positions between updates."""
    if isinstance(policy, TriAttention):
        return _expected(policy, noted, cut)
    if isinstance(policy, H2O):
        return noted.paid.sum(1)
    if isinstance(policy, Lru):
        return torch.tensor([[use for use in head for _ in range(policy.block)] for head in noted.uses])
    k, v = noted.pairs
    if isinstance(policy, Compactor):
        stays = {"kept": cut.chosen, "sinks": policy.sinks, "recent": policy.recent}
        plain = _turned_back(noted).transpose(0, 1)
        return compactor.published(plain, noted.queries.transpose(0, 1), k, v, noted.held, chunks, **stays)
    assert isinstance(policy, SnapKV)
    keys = k.gather(1, noted.held[..., None].expand(-1, -1, k.shape[2]))
    before = published(noted.queries[-policy.window :], keys.transpose(0, 1), policy.pool)
    return torch.nn.functional.pad(before, (0, policy.window))


def _turned_back(noted: Noted) -> Tensor:
    """Keys of all positions before their rotation, [positions, kv_heads, channels]."""
    k = noted.pairs[0].transpose(0, 1)
    angles = torch.arange(len(k))[:, None] * noted.inv_freq
    return rotate(k, angles.cos(), -angles.sin(), interleaved=False)


def _expected(policy: TriAttention, noted: Noted, cut: Cut) -> Tensor:
    plain, held = _turned_back(noted), noted.held
    free = slice(max(policy.sinks, cut.pinned), held.shape[1] - policy.recent)
    found = torch.full(held.shape, float("inf"))
    group = noted.expected.shape[1] // len(held)
    for head, own in enumerate(held[:, free]):
        queries = noted.expected[:, head * group : (head + 1) * group]
        keys = plain[own, head : head + 1]
        scores = triattention.published(queries, keys, own[None], len(plain), noted.inv_freq)
        found[head, free] = scores[0].float()
    return found


def _joined(policy: TriAttention, scores: Tensor) -> list[Tensor]:
    """By layer, of the heads that choose together. scores: [layers, kv_heads, rows]."""
    if policy.heads == "all":
        return [scores.amax((0, 1)).repeat(len(each), 1) for each in scores]
    return [scores.mean(0) for _ in scores] if policy.heads == "kv_head" else [*scores]
