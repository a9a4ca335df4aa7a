"""A plain attention over simulated codes, for transformers models: old rows are rounded, the newest are exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from llmc.program import EVERYTHING, CachePolicy
from tests.end_to_end.logits import Logits
from tests.end_to_end.stored_rows import stored_rows

_NAME = "plain_codes"


def rounded_logits(model: Any, tokens: list[int], kv_cache: str, policy: CachePolicy = EVERYTHING) -> Logits:
    """Return the logits of a model whose queries read the rows that a policy keeps. Older rows are rounded as in the
    cache; the newest ones are exact. kv_cache: as for stored_rows."""
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for own, places in zip(seen, policy.seen(len(tokens)), strict=True):
        own[places] = True
    with _attending(model, kv_cache, seen), torch.inference_mode():
        logits: Logits = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


@contextmanager
def _attending(model: Any, kv_cache: str, seen: Tensor) -> Iterator[None]:
    stored, before = stored_rows(kv_cache), model.config._attn_implementation

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        q, k, v = query[0], key[0], value[0]
        group, position = q.shape[0] // k.shape[0], torch.arange(k.shape[1])
        back = position[:, None] - position[None, :]
        window = options.get("sliding_window") or k.shape[1]
        is_near = back < stored.recent
        if window <= stored.recent:
            is_near = torch.ones_like(back, dtype=torch.bool)
        old_k, old_v, k, v = (x.repeat_interleave(group, 0) for x in (stored.keys(k), stored.values(v), k, v))
        scores = torch.where(is_near, q @ k.mT, q @ old_k.mT) * scaling
        shares = scores.masked_fill(~seen | (back >= window), -torch.inf).softmax(-1)
        out = (shares * is_near) @ v + (shares * ~is_near) @ old_v
        return out.transpose(0, 1)[None].contiguous(), None

    AttentionInterface.register(_NAME, attend)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
