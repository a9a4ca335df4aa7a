"""Keys and values as caches store them, for plain references: rounded by the ops that engines are tested against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kv_code_roundings import Rounding, exact, of_llmc
from llmc.formats.cache_format import parse_cache_formats
from llmc.options import is_dtype


@dataclass(frozen=True)
class StoredRows:
    """The numbers that are read back.

    Args:
        keys, values: From the numbers of one layer, fp32 [kv_heads, rows, channels], to those that are read back.
        recent: Number of newest rows that attention reads as they were. Scores of rows are those of stored rows.
    """

    keys: Rounding = exact
    values: Rounding = exact
    recent: int = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Causal attention over the rows of a cache, whose last ones are those of the queries.

        Args:
            query: [heads, tokens, channels].
            key, value: [kv_heads, rows, channels], as they were before they were stored.
            scaling: Factor of the logits.

        Returns:
            The result, [heads, tokens, channels], and the attention that queries pay to stored rows, [kv_heads, heads
            of each, tokens, rows].
        """
        group, count, rows = query.shape[0] // key.shape[0], query.shape[1], key.shape[1]
        back = torch.arange(rows - count, rows)[:, None] - torch.arange(rows)
        k, v, stored_k, stored_v = (
            each.repeat_interleave(group, 0) for each in (key, value, self.keys(key), self.values(value))
        )
        logits = (query @ stored_k.mT * scaling).masked_fill(back < 0, float("-inf"))
        paid = shares = logits.softmax(-1)
        result = shares @ stored_v
        if self.recent:
            is_near = (back >= 0) & (back < self.recent)
            shares = torch.where(is_near, query @ k.mT * scaling, logits).softmax(-1)
            result = (shares * is_near) @ v + (shares * ~is_near) @ stored_v
        return result, paid.view(key.shape[0], group, count, rows)


def stored_rows(cache: str) -> StoredRows:
    """How an engine of fp32 stores rows. cache: formats of codes, or a dtype."""
    if is_dtype(cache):
        dtype: torch.dtype = getattr(torch, cache)
        return StoredRows(lambda x: x.to(dtype).float(), lambda x: x.to(dtype).float())
    formats = parse_cache_formats(cache)
    return StoredRows(of_llmc(str(formats.keys)), of_llmc(str(formats.values)), formats.recent or 0)
