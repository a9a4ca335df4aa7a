"""Collectives of several GPUs, interpreted: each rank's memory is a buffer here, and the ranks run phase by phase.

Values and flags are put by all ranks in turn, then taken by all, as the two halves of the kernels do; other orders are
for processes (tests/runtime/ranks/test_interpreted_ranks.py) and for GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import triton
from torch import Tensor

from llmc.codegen.triton.kernels.ranks.all_gather import join_channels_kernel
from llmc.codegen.triton.kernels.ranks.rank_rows import rank_rows
from llmc.codegen.triton.kernels.ranks.reduce_rows import sum_gathered_kernel, sum_shares_kernel
from llmc.graph.op_record import RECORDS
from llmc.program.rank_memory import FLAGS, LOST_WORD, PLACE_BYTES, memory_bytes, places_at
from tests.codegen.triton.exchange_phases import put_kernel, take_channels_kernel, take_sum_kernel
from tests.codegen.triton.tensor_call import check
from tests.quick_sample import quick_sample
from tests.seeded_normal import seeded_normal

ops = torch.ops.llmc


class Ranks:
    """The memory of some ranks, and each one's table of where it is."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._memory = [torch.zeros(memory_bytes(count), dtype=torch.uint8) for _ in range(count)]
        addresses = [memory.data_ptr() for memory in self._memory]
        self.tables = [torch.tensor([rank, *addresses]) for rank in range(count)]

    @property
    def constants(self) -> dict[str, int]:
        """Of the first half."""
        return {"RANKS": self.count, "FLAGS": FLAGS, "AT": places_at(self.count), "SIZE": PLACE_BYTES}

    def put(self, xs: Sequence[Tensor], block: int) -> None:
        """Each rank's rows, which lie apart."""
        rows, channels = xs[0].shape
        for table, x in zip(self.tables, xs, strict=True):
            apart = torch.nn.functional.pad(x, (0, 16))
            grid = rows, triton.cdiv(channels, block)
            put_kernel[grid](table, apart, channels + 16, CHANNELS=channels, BLOCK=block, **self.constants)

    def sums(self, xs: Sequence[Tensor], block: int, residual: Tensor | None = None, **norm: object) -> list[Tensor]:
        """What each rank gets: the sum, or the norm and then the residual sum."""
        self.put(xs, block)
        rows, channels = xs[0].shape
        kind = {"weight_ptr": None, "bias_ptr": None, "eps": 0.0, "NORMED": False, "CENTRED": False} | norm
        results: list[Tensor] = []
        for table, x in zip(self.tables, xs, strict=True):
            y = torch.full_like(x, float("nan"))
            total = None if residual is None else torch.full_like(x, float("nan"))
            take_sum_kernel[rows, triton.cdiv(channels, block)](
                table, x, residual, y_ptr=y, sum_ptr=total, rows=rows, CHANNELS=channels, BLOCK=block, LOST=LOST_WORD,
                **kind, **self.constants,
            )  # fmt: skip
            results += [y] if total is None else [y, total]
        return results


def parts(ranks: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What each rank has."""
    return [seeded_normal(rank, *shape).to(dtype) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("ranks", "shape"), quick_sample([(2, (1, 64)), (3, (5, 77)), (8, (3, 200))], [(3, (5, 77))]))
def test_sums_in_the_order_of_ranks(ranks: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """To the bit the reference's, on all ranks, in exchange after exchange, whose places are used in turn."""
    team, across = Ranks(ranks), RECORDS[ops.all_reduce.default].across
    assert across is not None
    for turn in range(3):
        xs = [x * (1 + turn) for x in parts(ranks, *shape, dtype=dtype)]
        expected = across(xs, ranks)
        assert all(torch.equal(y, expected) for y in team.sums(xs, 64))
        # Another grid: flags of programs that were not there count for nothing.
        fewer = [x[:1, :7].contiguous() for x in xs]
        assert all(torch.equal(y, across(fewer, ranks)) for y in team.sums(fewer, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_centred", [False, True])
def test_with_residual_and_norm(is_centred: bool, dtype: torch.dtype) -> None:
    team, xs = Ranks(3), parts(3, 4, 100, dtype=dtype)
    residual, weight, bias = seeded_normal(7, 4, 100).to(dtype), seeded_normal(8, 100), seeded_normal(9, 100)
    reduced = RECORDS[ops.all_reduce.default].across
    assert reduced is not None
    given = (reduced(xs, 3), residual, weight.to(dtype))
    expected = ops.add_layer_norm(*given, bias.to(dtype), 1e-5) if is_centred else ops.add_rms_norm(*given, 1e-5)
    norm = {"weight_ptr": weight.to(dtype).float(), "bias_ptr": bias.to(dtype).float() if is_centred else None}
    results = team.sums(xs, 128, residual, **norm, eps=1e-5, NORMED=True, CENTRED=is_centred)
    for y, total in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close(y, expected[0], rtol=0, atol=1e-5 if dtype is torch.float32 else 1e-2)
        torch.testing.assert_close(total, expected[1], rtol=0, atol=0)
        assert torch.equal(y, results[0])


def test_gathered_rows_have_the_bits_of_exchanged_ones() -> None:
    """However many rows a step has, and so however they come: a row's sum and norm are the same."""
    xs, residual, weight = parts(3, 4, 100), seeded_normal(7, 4, 100), seeded_normal(8, 100)
    norm = {"weight_ptr": weight, "eps": 1e-5, "NORMED": True}
    expected = Ranks(3).sums(xs, 128, residual, **norm)[:2]
    y, total = torch.empty(4, 100), torch.empty(4, 100)
    sum_gathered_kernel[4, 1](
        torch.stack(xs), residual, 100, weight, None, y, 100, total, 100, 4, 1e-5, NORMED=True, CENTRED=False, RANKS=3,
        CHANNELS=100, BLOCK=128,
    )  # fmt: skip
    assert torch.equal(y, expected[0]) and torch.equal(total, expected[1])


@pytest.mark.parametrize("rows", [7, 6, 2])
def test_shared_rows_have_the_bits_of_exchanged_ones(rows: int) -> None:
    """Three ranks with two of seven rows each and one that all have; or with none of two rows."""
    xs, residual, weight = parts(3, rows, 100), seeded_normal(7, rows, 100), seeded_normal(8, 100)
    norm = {"weight_ptr": weight, "eps": 1e-5, "NORMED": True}
    expected = Ranks(3).sums(xs, 128, residual, **norm)[:2]
    share = rows // 3
    own = [torch.stack([torch.cat((x[r * share : (r + 1) * share], x[3 * share :])) for x in xs]) for r in range(3)]
    covered = torch.zeros(rows)
    for rank in range(3):
        y, total = torch.full((rows, 100), float("nan")), torch.full((rows, 100), float("nan"))
        sum_shares_kernel[triton.cdiv(rows, 3) + 2, 1](
            torch.tensor([rank]), own[rank], residual, 100, weight, None, y, 100, total, 100, rows, 1e-5,
            NORMED=True, CENTRED=False, RANKS=3, CHANNELS=100, BLOCK=128,
        )  # fmt: skip
        done = ~y.isnan().any(1)
        covered += done
        assert torch.equal(y[done], expected[0][done]) and torch.equal(total[done], expected[1][done])
        assert done[rank * share : (rank + 1) * share].all() and done[3 * share :].all()
        assert done.sum() == share + rows - 3 * share
    assert covered[: 3 * share].eq(1).all()


def test_channels_are_put_together_without_padding() -> None:
    """Three ranks with 7, 7 and 3 channels of a vocabulary of 17."""
    team, xs, ends = Ranks(3), parts(3, 2, 7), torch.tensor([7, 14, 17], dtype=torch.int32)
    across = RECORDS[ops.all_gather.default].across
    assert across is not None
    expected = across(xs, ends, 17)
    team.put(xs, 4)
    for table, x in zip(team.tables, xs, strict=True):
        y = torch.full((2, 20), float("nan"))
        sizes = {"CHANNELS": 7, "BLOCK": 4, "LOST": LOST_WORD}
        take_channels_kernel[2, 2](table, x, ends, y, 20, 2, **sizes, **team.constants)
        assert torch.equal(y[:, :17], expected) and y[:, 17:].isnan().all()
    y = torch.full((2, 20), float("nan"))
    join_channels_kernel[2, 2](torch.stack(xs), ends, y, 20, 2, RANKS=3, CHANNELS=7, BLOCK=4)
    assert torch.equal(y[:, :17], expected) and y[:, 17:].isnan().all()


def test_rank_rows(device: str) -> None:
    ids = torch.tensor([0, 6, 7, 8, 13, 14, 400, 7], dtype=torch.int32)
    check(rank_rows, ids, torch.tensor([7], dtype=torch.int32), 7, device=device, tolerance=0.0)


def test_a_lost_rank_ends_the_wait() -> None:
    """Else the launch would never end, nor its process."""
    team, (x, _) = Ranks(2), parts(2, 1, 16)
    grid = {"CHANNELS": 16, "BLOCK": 16, **team.constants}
    put_kernel[1, 1](team.tables[0], x, 16, **grid)
    team._memory[0].view(torch.int32)[LOST_WORD] = 1
    y = torch.empty(1, 16)
    take_sum_kernel[1, 1](
        team.tables[0], x, None, None, None, y, None, 1, 0.0, NORMED=False, CENTRED=False, LOST=LOST_WORD, **grid
    )
