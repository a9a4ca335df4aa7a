"""llmc::rotate_heads against the matrix that it stands for."""

from __future__ import annotations

import pytest
import torch

from llmc.ops.rotate_heads import rotate_heads, rotation_block


def hadamard(channels: int) -> torch.Tensor:
    """The matrix by its definition, block-diagonal."""
    block = rotation_block(channels)
    i = torch.arange(channels)
    ones = [[bin(int(a & b) % block).count("1") for b in i] for a in i]
    signs = (-1.0) ** torch.tensor(ones)
    return torch.where(i[:, None] // block == i // block, signs / block**0.5, 0.0)


@pytest.mark.parametrize("channels", [1, 2, 64, 80, 96])
def test_is_a_product_with_hadamard_s_matrix(channels: int) -> None:
    x = torch.randn(3, 2, channels, generator=torch.Generator().manual_seed(0))
    y = rotate_heads(x, channels)
    torch.testing.assert_close(y, x @ hadamard(channels))
    torch.testing.assert_close(rotate_heads(y, channels), x)


def test_keeps_inner_products_and_shares_outliers() -> None:
    q, k = torch.randn(2, 5, 1, 64, generator=torch.Generator().manual_seed(1)).unbind()
    k[..., 17] += 40.0
    turned = rotate_heads(k, 64)
    torch.testing.assert_close((rotate_heads(q, 64) * turned).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-4)
    assert k.abs().amax() > 5 * turned.abs().amax()


def test_the_rest_is_rotated_apart() -> None:
    x = torch.randn(2, 3, 24 + 64)
    y = rotate_heads(x, 24)
    torch.testing.assert_close(y[..., :24], rotate_heads(x[..., :24], 24))
    torch.testing.assert_close(y[..., 24:], rotate_heads(x[..., 24:], 64))
