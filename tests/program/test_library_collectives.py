"""The collectives of GPUs' programs over gloo, between processes: what lies where, whatever the rows and ranks."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from llmc.program.library_collectives import exchange_parts, exchange_rows, gather_rows, gather_shares

RANKS, WIDTH = 2, 4
ROWS = (1, 4, 7)
NOBODY = torch.zeros(0)
UNTOUCHED = -1.0


def own_rows(rank: int, rows: int) -> torch.Tensor:
    """Of a rank: [rows, WIDTH], each number its own."""
    return (1000 * rank + torch.arange(rows * WIDTH, dtype=torch.float32)).view(rows, WIDTH)


def room(*shape: int) -> torch.Tensor:
    """With one element more than is asked for, which nobody may write."""
    return torch.full((torch.Size(shape).numel() + 1,), UNTOUCHED)


def found(rank: int) -> dict[str, torch.Tensor]:
    """What each collective gives a rank, by name and rows. x's rows lie apart."""
    results: dict[str, torch.Tensor] = {}
    for rows in ROWS:
        x = torch.full((rows, WIDTH + 3), UNTOUCHED)
        x[:, :WIDTH] = own_rows(rank, rows)
        whole, parts = room(RANKS, rows, WIDTH), room(rows, WIDTH)
        gather_rows(NOBODY, x, WIDTH + 3, whole, rows, WIDTH, RANKS)
        exchange_parts(NOBODY, x, WIDTH + 3, parts, rows, WIDTH, RANKS)
        share, rest = divmod(rows, RANKS)
        sent, shares = room(RANKS, share + rest, WIDTH), room(RANKS, share + rest, WIDTH)
        exchange_rows(NOBODY, x, WIDTH + 3, sent, shares, rows, WIDTH, RANKS)
        y = room(rows, WIDTH)
        y[:-1] = own_rows(rank, rows).view(-1)
        gather_shares(NOBODY, y, rows, WIDTH, RANKS)
        results |= {f"whole {rows}": whole, f"parts {rows}": parts, f"shares {rows}": shares, f"y {rows}": y}
    return results


def run_rank(rank: int, store: str, answers: Connection) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    answers.send({name: tensor.tolist() for name, tensor in found(rank).items()})
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_every_rank_gets_what_is_its_own(tmp_path: Path) -> None:
    # A fork has torch already; a new process would take seconds to import it.
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [context.Process(target=run_rank, args=(r, str(tmp_path / "s"), ends[r][1])) for r in range(RANKS)]
    for process in processes:
        process.start()
    for _, sending in ends:
        sending.close()
    answers = [receiving.recv() for receiving, _ in ends]
    for process in processes:
        process.join()
    for rank, answer in enumerate(answers):
        for rows in ROWS:
            x = [own_rows(each, rows) for each in range(RANKS)]
            share = rows // RANKS
            mine = slice(rank * share, (rank + 1) * share)
            expected = {
                "whole": torch.stack(x),
                "parts": torch.stack([each.view(RANKS, -1)[rank] for each in x]),
                "shares": torch.stack([torch.cat([each[mine], each[RANKS * share :]]) for each in x]),
                "y": torch.cat([*(x[r][r * share : (r + 1) * share] for r in range(RANKS)), x[rank][RANKS * share :]]),
            }
            for name, tensor in expected.items():
                assert answer[f"{name} {rows}"] == [*tensor.view(-1).tolist(), UNTOUCHED], (rank, name, rows)
