"""The reference of products with experts' weights, by which engines for the target `reference` answer."""

import pytest
import torch

from llmc.ops.expert_linear import expert_linear
from llmc.runtime.executors.reference_tiles import TILE


@pytest.mark.parametrize("each_slot", [False, True])
def test_no_bit_of_a_token_depends_on_where_the_others_of_its_tile_go(each_slot: bool) -> None:
    torch.manual_seed(0)
    experts, slots, channels = 16, 2, 64
    x = torch.randn((TILE, slots, channels) if each_slot else (TILE, channels))
    weight, bias = torch.randn(experts * 128, channels), torch.randn(experts * 128)
    index = torch.randint(experts, (TILE, slots))
    y = expert_linear(x, weight, bias, index, experts)
    for token in range(TILE):
        others = torch.randint(experts, (TILE, slots))
        others[token] = index[token]
        assert torch.equal(expert_linear(x, weight, bias, others, experts)[token], y[token])


def test_many_tokens_have_the_products_of_few() -> None:
    torch.manual_seed(0)
    experts, slots, count = 3, 2, 3 * TILE
    x, weight = torch.randn(count, slots, 40), torch.randn(experts * 8, 40)
    index = torch.randint(experts + 1, (count, slots))
    parts = [expert_linear(a, weight, None, b, experts) for a, b in zip(x.split(TILE), index.split(TILE), strict=True)]
    torch.testing.assert_close(expert_linear(x, weight, None, index, experts), torch.cat(parts))
