"""Steps of decodes, for tests that run on a machine with a GPU too: nothing here needs Hypothesis."""

from __future__ import annotations

import numpy as np

from llmc.runtime.loop.step import Step


def decodes(contexts: list[int], block_size: int = 16) -> Step:
    """One token for each context; request r has the blocks from 100·r on."""
    count, columns = len(contexts), -(-max(contexts) // block_size)
    tables = np.arange(count, dtype=np.int32)[:, None] * 100 + np.arange(columns, dtype=np.int32)[None, :]
    positions = np.asarray(contexts, np.int32) - 1
    slots = tables[np.arange(count), positions // block_size] * block_size + positions % block_size
    return Step(
        input_ids=np.arange(7, 7 + count, dtype=np.int32),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=np.asarray(contexts, np.int32),
        block_tables=tables,
        logit_rows=np.arange(count, dtype=np.int32),
        tree_masks=np.zeros(count, np.int64),
    )
