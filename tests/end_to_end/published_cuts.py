"""The rows that published algorithms keep of what an engine's own caches held."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmc.program import KVzip, Lru, Progress, Scored
from tests.end_to_end.published_choice import best_rows, chosen_rows
from tests.end_to_end.reference_answer import Kept
from tests.end_to_end.scored_reference import empty_notes
from tests.end_to_end.stored_rows import StoredRows
from tests.end_to_end.watched_cuts import Watched, WatchedLayer
from tests.tiny_models import tiny_model


def published_cuts(policy: Scored, prompt: int, seen: Sequence[Watched], family: str = "llama") -> list[Kept]:
    """The rows that each cut of a request keeps. prompt: tokens of it. seen: all of its compactions."""
    if isinstance(policy, KVzip):
        return [_after_reading(policy, seen)]
    with torch.inference_mode():
        notes = empty_notes(tiny_model(family), policy)
    found, done = list[Kept](), Progress(prompt)
    for each in seen:
        end, cut = each.this.tokens, policy.cut(done)
        assert end == policy.next_cut(done)
        for noted, layer in zip(notes, each.layers, strict=True):
            new = slice(noted.held.shape[1], each.this.rows)
            queries = noted.queries[:0] if layer.queries is None else layer.queries
            paid = _paid(queries, layer).mean(1)
            noted.add(queries, layer.keys[:, new], layer.values[:, new], paid)
            if isinstance(policy, Lru):
                noted.use(policy, end)
        if cut.leaving:
            best = chosen_rows(policy, notes, cut, prompt)
            for noted, rows in zip(notes, best, strict=True):
                noted.keep(rows, policy.block)
            found.append([rows.tolist() for rows in best])
        done = done.after(end, cut)
    return found


def _paid(queries: Tensor, layer: WatchedLayer) -> Tensor:
    """The attention that queries pay to rows, [kv_heads, query heads of each, queries, rows]."""
    scaling = layer.keys.shape[2] ** -0.5
    return StoredRows().attend(queries.transpose(0, 1), layer.keys, layer.values, scaling)[1]


def _after_reading(policy: KVzip, seen: Sequence[Watched]) -> Kept:
    """The rows with the highest peaks. The first compaction comes before the second reading."""
    first, *updates = seen
    peaks = [torch.zeros(len(layer.keys), first.this.tokens) for layer in first.layers]
    for each in updates:
        for peak, layer in zip(peaks, each.layers, strict=True):
            assert layer.queries is not None
            paid = _paid(layer.queries, layer).amax((1, 2))[:, : first.this.tokens]
            torch.maximum(peak, paid, out=peak)
    return [best_rows(each, seen[-1].this.kept, policy.sinks).tolist() for each in peaks]
