"""Library collectives that stand where a kernel does: NCCL through torch.distributed on GPUs, gloo on CPUs.

They only move values; kernels add them up, in the order of ranks. NCCL's own sums are rounded at each hop, in an order
that depends on where in the message an element lies, so that a token's bits would depend on its neighbours. The group
is torch's default one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def gather_rows(
    ranks_ptr: Tensor, x_ptr: Tensor, x_row_stride: int, whole_ptr: Tensor, rows: int, WIDTH: int, RANKS: int
) -> None:
    """whole[r, i] = rank r's x[i], for `rows` rows of WIDTH; whole: contiguous."""
    import torch.distributed as distributed

    x = x_ptr.as_strided((rows, WIDTH), (x_row_stride, 1)).contiguous()
    distributed.all_gather_into_tensor(whole_ptr[: RANKS * rows * WIDTH], x.view(-1))


def exchange_parts(
    ranks_ptr: Tensor, x_ptr: Tensor, x_row_stride: int, parts_ptr: Tensor, rows: int, WIDTH: int, RANKS: int
) -> None:
    """parts[r] = the part of rank r's x that is this rank's, for `rows` rows of WIDTH, taken together and cut into one
    part per rank; parts: contiguous. RANKS divides WIDTH."""
    import torch.distributed as distributed

    x = x_ptr.as_strided((rows, WIDTH), (x_row_stride, 1)).contiguous()
    distributed.all_to_all_single(parts_ptr[: rows * WIDTH], x.view(-1))


def exchange_rows(
    ranks_ptr: Tensor, x_ptr: Tensor, x_row_stride: int, sent_ptr: Tensor, parts_ptr: Tensor, rows: int, WIDTH: int,
    RANKS: int,
) -> None:  # fmt: skip
    """parts[r] = rank r's x in this rank's share of the rows, `rows` // RANKS of them, and in those after all shares,
    fewer than RANKS; parts: contiguous. sent: where it is put together, if there are rows after all shares."""
    import torch.distributed as distributed

    share, rest = divmod(rows, RANKS)
    x = x_ptr.as_strided((rows, WIDTH), (x_row_stride, 1))
    sent = x.contiguous()
    if rest:
        sent = sent_ptr[: RANKS * (share + rest) * WIDTH].view(RANKS, share + rest, WIDTH)
        sent[:, :share] = x[: RANKS * share].unflatten(0, (RANKS, share)) if share else x[:0]
        sent[:, share:] = x[RANKS * share :]
    distributed.all_to_all_single(parts_ptr[: sent.numel()], sent.view(-1))


def gather_shares(ranks_ptr: Tensor, y_ptr: Tensor, rows: int, WIDTH: int, RANKS: int) -> None:
    """Send each rank's share of the rows of y to all others, in place; shares are those of exchange_rows. y:
    contiguous."""
    import torch.distributed as distributed

    share = rows // RANKS * WIDTH
    if share:
        start = distributed.get_rank() * share
        distributed.all_gather_into_tensor(y_ptr[: RANKS * share], y_ptr[start : start + share])


FUNCTIONS: Mapping[str, Callable[..., None]] = {
    "gather_rows": gather_rows,
    "exchange_parts": exchange_parts,
    "exchange_rows": exchange_rows,
    "gather_shares": gather_shares,
}
