"""last_uses: a block is used by an update that pays it at least its share, and new blocks are used."""

from __future__ import annotations

import torch

from llmc.ops.last_uses import block_uses


def test_a_use_is_at_least_a_block_s_share() -> None:
    """Four blocks of two rows: an even share is a quarter. The last block is new."""
    attention = torch.tensor([[0.20, 0.05, 0.10, 0.10, 0.30, 0.10, 0.05, 0.10]])
    uses = torch.tensor([[2.5, 2.5, 1.7, 1.7, 3.2, 3.2]])
    found = block_uses(attention, uses, 2, 2)
    torch.testing.assert_close(found, torch.tensor([[4.25, 4.25, 1.7, 1.7, 4.4, 4.4, 4.15, 4.15]]))


def test_the_first_update_uses_all() -> None:
    attention = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])
    found = block_uses(attention, torch.zeros(2, 0), 4, 2)
    torch.testing.assert_close(found, torch.tensor([[1.999, 1.999, 1.0, 1.0], [1.0, 1.0, 1.999, 1.999]]))


def test_the_blocks_that_leave_are_those_of_a_list_by_last_use() -> None:
    """Updates with random attention: the order of scores is that of (last use, attention then)."""
    generator = torch.Generator().manual_seed(5)
    uses, last = torch.zeros(1, 0), list[tuple[int, float]]()
    for number in range(1, 9):
        rows = 4 * number
        attention = (2 * torch.randn(1, rows, generator=generator)).softmax(-1)
        shares = attention.view(number, 4).sum(-1).tolist()
        last.append((0, 0.0))
        for block, share in enumerate(shares):
            if block == number - 1 or share >= 1 / number:
                last[block] = (number, share)
        uses = block_uses(attention, uses, 4, 4)
        by_score = uses[0, ::4].argsort(descending=True).tolist()
        assert by_score == sorted(range(number), key=lambda block: last[block], reverse=True)
