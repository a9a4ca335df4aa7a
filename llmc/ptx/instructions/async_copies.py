"""cp.async: copies from global into shared memory that threads commit in groups and wait for."""

import numpy as np

from llmc.ptx.access import Operands
from llmc.ptx.elementwise import Action
from llmc.ptx.finding import Check
from llmc.ptx.global_access import read_global
from llmc.ptx.global_memory import WORDS, Indices
from llmc.ptx.lanes import U8, U32, Mask, Values
from llmc.ptx.modifiers import SHARED, Modifiers
from llmc.ptx.team import Team

_PREFETCH = ("L2::64B", "L2::128B", "L2::256B")


def build_cp_async(operands: Operands, modifiers: Modifiers) -> Action:
    """cp.async, its commits and its waits. The name's second part is taken already."""
    if modifiers.flag("commit_group"):
        modifiers.finish()
        operands.count(0)
        return lambda team, mask: team.copies.commit(team.lanes(mask))
    if modifiers.flag("wait_all"):
        modifiers.finish()
        operands.count(0)
        return lambda team, mask: team.copies.wait(team.lanes(mask), None)
    if modifiers.flag("wait_group"):
        modifiers.finish()
        operands.count(1)
        most = operands.number(0)
        return lambda team, mask: team.copies.wait(team.lanes(mask), most)
    return _copy(operands, modifiers)


def _copy(operands: Operands, modifiers: Modifiers) -> Action:
    """If a source size is given, the bytes after it are zeros and not read."""
    modifiers.one_of("ca", "cg")
    modifiers.one_of(*SHARED)
    modifiers.one_of("global")
    has_policy = modifiers.flag("L2::cache_hint")
    modifiers.maybe(*_PREFETCH)
    modifiers.finish()
    operands.count(*((4, 5) if has_policy else (3, 4)))
    nbytes = operands.number(2)
    if nbytes not in (4, 8, 16):
        raise operands.refused(operands.given[2])
    target, source, at = operands.address(0), operands.address(1), operands.instruction
    size = operands.reader(3, U32) if len(operands.given) > 3 + has_policy else None

    def run(team: Team, mask: Mask) -> None:
        index, lanes, good = team.shared.locate(team.chosen(target(team), mask), team.lanes(mask), nbytes, at)
        addresses = team.chosen(source(team), mask)
        sizes = None if size is None else np.minimum(team.chosen(size(team), mask), np.uint32(nbytes))
        if good is not None:
            addresses, sizes = addresses[good], None if sizes is None else sizes[good]
        words = _source_words(team, operands, addresses, sizes, lanes, nbytes)
        team.shared.shadow.begin_write(index, nbytes, lanes, at)
        team.shared.store(index, nbytes, words)
        team.copies.begin(index, nbytes, lanes)

    return run


def _source_words(
    team: Team, operands: Operands, addresses: Values, sizes: Values | None, lanes: Indices, nbytes: int
) -> Values:
    """The words that each thread copies. sizes: bytes that it reads; None for all."""
    if sizes is None or (sizes == nbytes).all():
        return read_global(team, operands, addresses, nbytes, lanes.__getitem__)
    octets = np.zeros((len(lanes), nbytes), U8)
    odd = (addresses & nbytes - 1 != 0) & (sizes > 0)
    if odd.any():
        detail = f"{int(addresses[odd][0]):#x} is not a multiple of {nbytes}"
        team.tell(Check.ALIGNMENT, detail, lanes[odd], operands.instruction)
    for length in map(int, np.unique(sizes[sizes > 0])):
        alike = np.flatnonzero(sizes == length)
        # The largest words that such a size is a multiple of.
        word = length & -length
        parts = (addresses[alike][:, None] + np.arange(0, length, word)).reshape(-1)
        owners = np.repeat(lanes[alike], length // word)
        values = read_global(team, operands, parts, word, owners.__getitem__)
        octets[alike, :length] = values.view(U8).reshape(-1, length)
    return octets.view(WORDS[nbytes])[:, 0]
