"""The ways to launch a sum over ranks, by how many rows there are, with the residual sum and the norm that follow it.

few rows    one launch, in which the ranks read each other's memory
more rows   a library gathers all ranks' rows, one launch sums them: for two ranks no other way moves fewer bytes
more ranks  the library sends each rank a part of all ranks' rows, a launch sums these, the library gathers the sums;
            an operation that follows takes another launch: 2 · (ranks - 1) / ranks times the bytes
or shares   the same with whole rows, where a norm follows that each rank computes for its share (row_shares.py)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import Constant, DeviceLaunch, LibraryFunction, rows
from llmc.codegen.triton.kernels.ranks.reduce_rows import reduce_rows_kernel, sum_gathered_kernel, sum_shares_kernel
from llmc.codegen.triton.kernels.ranks.row_shares import RowShares
from llmc.program import library_collectives
from llmc.program.launch_arguments import Argument, Count, Operand, Rows
from llmc.program.rank_memory import FLAGS, LOST_WORD, MOST_PROGRAMS, PLACE_BYTES, places_at
from llmc.targets import GpuTarget

RANKS = Operand("engine", "ranks")
GATHER_ROWS = LibraryFunction(library_collectives.gather_rows)
EXCHANGE_PARTS = LibraryFunction(library_collectives.exchange_parts)
EXCHANGE_ROWS = LibraryFunction(library_collectives.exchange_rows)
GATHER_SHARES = LibraryFunction(library_collectives.gather_shares)
# A norm's program holds a whole row in registers; longer rows would spill.
LONGEST_NORMED_ROW = 16384
_BLOCK = 2048
_RANKS_AT_ONCE = 4
_ELEMENTS_PER_WARP = 256


@dataclass(frozen=True)
class Following:
    """The operation after a sum. arguments: residual, weight, bias, sum and eps, by the kernels' names. shares: how the
    ranks share its rows; None if every rank computes all rows."""

    arguments: Mapping[str, Argument]
    is_normed: bool = False
    is_centred: bool = False
    shares: RowShares | None = None


NOTHING: Mapping[str, Argument] = {
    **rows("residual", None),
    "weight_ptr": None,
    "bias_ptr": None,
    **rows("sum", None),
    "eps": 0.0,
}


@dataclass(frozen=True)
class _Sum:
    """A sum to launch: its rows, and its destination."""

    x: Operand
    y: Operand
    count: Count | Rows | int
    channels: int
    dtype: torch.dtype
    ranks: int
    following: Following

    @property
    def block(self) -> int:
        """Channels that a program has at a time."""
        most = LONGEST_NORMED_ROW if self.following.is_normed else _BLOCK
        return min(most, int(triton.next_power_of_2(self.channels)))

    @property
    def programs(self) -> int:
        """Programs per row."""
        return -(-self.channels // self.block)

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank's values in a row."""
        return self.channels * self.dtype.itemsize


def reduce_launches(
    collective: Call, into: Operand, following: Following, target: GpuTarget
) -> tuple[DeviceLaunch, ...]:
    """The launches of a sum over ranks, or of the operation that fused it. into: rows."""
    x, (channels,) = collective.rows("x"), collective.shape("x")
    assert x is not None
    ranks = collective.plain("ranks")
    wanted = _Sum(x, into, collective.count("x"), channels, collective.dtype("x"), ranks, following)
    most = most_rows(wanted.row_bytes, wanted.programs, ranks, target)
    launches = [_by_memory(wanted, most, target)] if most else []
    moved = collective.limits().max_batch_tokens * wanted.row_bytes
    # Bringing each its part takes as long as gathering does.
    seconds = 2 * target.links.of(ranks).all_gather(moved, ranks, custom=False)
    if following.shares is not None:
        rest = _by_shares(collective, wanted)
    elif ranks > 2 and channels % ranks == 0:
        rest = _by_parts(collective, wanted)
    else:
        rest = _gathered(collective, wanted)
        seconds = target.links.of(ranks).all_gather(ranks * moved, ranks, custom=False)
    return *launches, replace(rest, min_tokens=most + 1, seconds=seconds)


def most_rows(row_bytes: int, programs: int, ranks: int, target: GpuTarget) -> int:
    """Rows that fit into a place, and whose programs all run at once, since each waits for those of other ranks; none
    where ranks cannot read each other's memory."""
    if target.links.of(ranks).shot is None:
        return 0
    return min(PLACE_BYTES // row_bytes, min(target.sm_count, MOST_PROGRAMS) // programs)


def memory_seconds(nbytes: int, ranks: int, target: GpuTarget) -> float:
    """Seconds until every rank has read `nbytes` bytes of values from each other rank."""
    link = target.links.of(ranks)
    assert link.shot is not None
    return link.shot.start + (ranks - 1) * nbytes / link.bandwidth


def memory_constants(ranks: int) -> dict[str, Constant]:
    """The constants for the layout of the ranks' memory."""
    return {"RANKS": ranks, "FLAGS": FLAGS, "AT": places_at(ranks), "SIZE": PLACE_BYTES, "LOST": LOST_WORD}


def _by_memory(s: _Sum, most: int, target: GpuTarget) -> DeviceLaunch:
    arguments = {"ranks_ptr": RANKS, **rows("x", s.x), **s.following.arguments, **rows("y", s.y), "rows": s.count}
    return DeviceLaunch(
        reduce_rows_kernel,
        arguments,
        {**_constants(s), **memory_constants(s.ranks), "AT_ONCE": min(s.ranks, _RANKS_AT_ONCE)},
        _grid(s),
        num_warps=_warps(s),
        max_tokens=most,
        seconds=memory_seconds(most * s.row_bytes, s.ranks, target),
    )


def _gathered(call: Call, s: _Sum) -> DeviceLaunch:
    whole = call.workspace("gathered", s.count, s.ranks * s.channels, s.dtype)
    last = _sum_gathered(s, whole.pointer)
    return replace(gather_launch(s.x, whole, s.count, s.channels, s.ranks), then=(last,))


def _by_parts(call: Call, s: _Sum) -> DeviceLaunch:
    own_width = s.channels // s.ranks
    parts = call.workspace("parts", s.count, s.channels, s.dtype)
    own = call.workspace("own", s.count, own_width, s.dtype)
    is_alone = s.following.arguments == NOTHING and s.y.stride == s.channels
    whole = s.y if is_alone else call.workspace("whole", s.count, s.channels, s.dtype)
    part = replace(s, y=own, channels=own_width, following=Following(NOTHING))
    steps = [_sum_gathered(part, parts.pointer)]
    steps.append(gather_launch(own, whole, s.count, own_width, s.ranks))
    if not is_alone:
        steps.append(_sum_gathered(replace(s, ranks=1), whole.pointer))
    exchanged = {**rows("x", s.x), "parts_ptr": parts.pointer}
    return replace(_library(EXCHANGE_PARTS, s.count, s.channels, s.ranks, exchanged), then=tuple(steps))


def _by_shares(call: Call, s: _Sum) -> DeviceLaunch:
    shares, following = s.following.shares, s.following.arguments
    assert shares is not None
    # Elements of all rows that a step may have, and of the rows past all shares, for each rank.
    most = (call.limits().max_batch_tokens + s.ranks * (s.ranks - 1)) * s.channels
    sent, parts = (call.workspace(name, 1, most, s.dtype).pointer for name in ("sent", "parts"))
    wanted = {"y": s.y}
    if shares.gathers_sum:
        total, stride = following["sum_ptr"], following["sum_row_stride"]
        assert isinstance(total, Operand) and isinstance(stride, int)
        wanted["sum"] = replace(total, stride=stride)
    whole = {
        name: to if to.stride == s.channels else call.workspace(f"whole_{name}", s.count, s.channels, s.dtype)
        for name, to in wanted.items()
    }
    to = {key: value for name, operand in whole.items() for key, value in rows(name, operand).items()}
    own = DeviceLaunch(
        sum_shares_kernel,
        {"rank_ptr": RANKS, "parts_ptr": parts, **following, **to, "rows": s.count},
        _constants(s),
        (f"cdiv({s.count}, {s.ranks}) + {s.ranks - 1}", str(s.programs)),
        num_warps=_warps(s),
    )
    steps = [own]
    for name, operand in whole.items():
        steps.append(_library(GATHER_SHARES, s.count, s.channels, s.ranks, {"y_ptr": operand.pointer}))
        if operand is not wanted[name]:
            copied = replace(s, y=wanted[name], ranks=1, following=Following(NOTHING))
            steps.append(_sum_gathered(copied, operand.pointer))
    exchanged = {**rows("x", s.x), "sent_ptr": sent, "parts_ptr": parts}
    return replace(_library(EXCHANGE_ROWS, s.count, s.channels, s.ranks, exchanged), then=tuple(steps))


def gather_launch(x: Operand, whole: Operand, count: Count | Rows | int, width: int, ranks: int) -> DeviceLaunch:
    """The library's launch that brings all ranks' rows."""
    return _library(GATHER_ROWS, count, width, ranks, {**rows("x", x), "whole_ptr": whole.pointer})


def _library(
    function: LibraryFunction, count: Count | Rows | int, width: int, ranks: int, operands: Mapping[str, Argument]
) -> DeviceLaunch:
    sizes = {"rows": count, "WIDTH": width, "RANKS": ranks}
    return DeviceLaunch(function, {"ranks_ptr": RANKS, **operands, **sizes}, {}, ("1",))


def _sum_gathered(s: _Sum, gathered: Operand) -> DeviceLaunch:
    arguments = {"gathered_ptr": gathered, **s.following.arguments, **rows("y", s.y), "rows": s.count}
    return DeviceLaunch(sum_gathered_kernel, arguments, _constants(s), _grid(s), num_warps=_warps(s))


def _constants(s: _Sum) -> dict[str, Constant]:
    kind: dict[str, Constant] = {"NORMED": s.following.is_normed, "CENTRED": s.following.is_centred}
    return {**kind, "RANKS": s.ranks, "CHANNELS": s.channels, "BLOCK": s.block}


def _grid(s: _Sum) -> tuple[str, ...]:
    return str(s.count), str(s.programs)


def _warps(s: _Sum) -> int:
    return max(1, min(16, s.block // _ELEMENTS_PER_WARP))
