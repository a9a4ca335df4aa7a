"""Sequence parallel: whether each rank computes the norm after a sum over ranks for a share of the rows only.

    whole rows    every rank gets all sums, adds the residual and norms all rows
    shares        every rank gets the sums of its share of the rows (reduce_scatter), adds its residual rows, norms
                  these, and all ranks get all normed rows (all_gather): the same bytes, 1 / ranks of the work
The remaining rows, fewer than ranks, are computed by all ranks. The residual sum of a share stays on its rank: the next
sum adds to it without other rows, if that sum is shared as well. Norms whose residuals come from one another are a
chain. If another operation reads the last residual sum, it is gathered, once per chain; so a chain uses shares if the
gather takes less time than its norms save.
Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
"""

from dataclasses import dataclass

from llmc.codegen.call import Call
from llmc.targets import GpuTarget


@dataclass(frozen=True)
class RowShares:
    """gathers_sum: whether all ranks also need the residual sum."""

    gathers_sum: bool


def row_shares(call: Call, channels: int, ranks: int, target: GpuTarget) -> RowShares | None:
    """Return how ranks share the rows of a norm over a sum of ranks; None if every rank norms all rows."""
    chain = _chain(call)
    is_read = bool(_readers(chain[-1]))
    row_bytes = channels * call.dtype("x").itemsize
    tokens = call.limits().max_batch_tokens
    # Sum and residual are read, the normed row and its sum written.
    saved = len(chain) * (ranks - 1) / ranks * 4 * row_bytes * tokens / target.bandwidth
    gathering = target.links.of(ranks).all_gather(row_bytes * tokens, ranks, custom=False) if is_read else 0.0
    return RowShares(gathers_sum=is_read and call == chain[-1]) if saved > gathering else None


def _chain(call: Call) -> list[Call]:
    """The norms around one that hand on their residual sums, first to last."""
    chain = [call]
    while (before := _before(chain[0])) is not None:
        chain.insert(0, before)
    while (after := _after(chain[-1])) is not None:
        chain.append(after)
    return chain


def _before(call: Call) -> Call | None:
    residual = residual_of(call)
    found = None if residual is None else call.producer(residual, 1)
    return found if found is not None and _after(found) == call else None


def _after(call: Call) -> Call | None:
    """The one that adds to its residual sum, if that is all that reads it."""
    readers = _readers(call)
    if len(readers) != 1:
        return None
    (reader,) = readers
    residual = residual_of(reader)
    return reader if residual is not None and reader.producer(residual, 1) == call else None


def _readers(call: Call) -> tuple[Call, ...]:
    return call.readers(1)


def residual_of(call: Call) -> str | None:
    """The argument that is added to the sum over ranks that the call fuses; None if the call fuses none."""
    names = call.names()
    if "residual" not in names or "x" not in names:
        return None
    return next((other for name, other in (("residual", "x"), ("x", "residual")) if call.within(name)), None)
