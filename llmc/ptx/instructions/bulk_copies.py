"""cp.async.bulk: boxes of tensors between global and shared memory, as tensor maps describe them, and requests to the
L2 cache.

A load reports its bytes to an mbarrier; stores are committed in groups and waited for. The part of a box outside its
tensor is loaded as zeros and not stored.
"""

from collections.abc import Callable, Iterator

import numpy as np

from llmc.ptx.access import Operands, Reader
from llmc.ptx.elementwise import Action
from llmc.ptx.finding import Check
from llmc.ptx.global_access import read_global, write_global
from llmc.ptx.global_memory import WORDS, Indices
from llmc.ptx.lanes import S32, U8, Mask, Values
from llmc.ptx.modifiers import Modifiers
from llmc.ptx.module import Address
from llmc.ptx.shared_memory import SHARED_BASE
from llmc.ptx.team import Team
from llmc.ptx.tensor_map import NBYTES, TensorMap, read_map, swizzled

_CHUNK = 16


def build_bulk(operands: Operands, modifiers: Modifiers) -> Action:
    """cp.async.bulk.*, without the name's first three parts."""
    if modifiers.flag("commit_group"):
        modifiers.finish()
        operands.count(0)
        return lambda team, mask: team.bulk_stores.commit(team.lanes(mask))
    if modifiers.flag("wait_group"):
        modifiers.flag("read")
        modifiers.finish()
        operands.count(1)
        most = operands.number(0)
        return lambda team, mask: team.bulk_stores.wait(team.lanes(mask), most)
    if modifiers.flag("prefetch"):
        return _prefetch(operands, modifiers)
    modifiers.one_of("tensor")
    rank = int(modifiers.one_of("1d", "2d", "3d", "4d", "5d")[0])
    modifiers.flag("tile")
    if modifiers.starts_with("global", "shared::cta"):
        modifiers.one_of("bulk_group")
        return _store(operands, modifiers, rank)
    modifiers.one_of("shared::cta", "shared::cluster")
    modifiers.one_of("global")
    modifiers.one_of("mbarrier::complete_tx::bytes")
    return _load(operands, modifiers, rank)


def _prefetch(operands: Operands, modifiers: Modifiers) -> Action:
    """Requests to the L2 cache, which have no effect but must be for memory that can be read."""
    modifiers.one_of("L2")
    modifiers.one_of("global")
    _finish(operands, modifiers, 2)
    address, nbytes = operands.address(0), operands.number(1)
    parts = np.arange(0, nbytes, _CHUNK)

    def run(team: Team, mask: Mask) -> None:
        addresses = team.chosen(address(team), mask)
        lanes = np.repeat(team.lanes(mask), len(parts))
        read_global(team, operands, (addresses[:, None] + parts).reshape(-1), _CHUNK, lambda places: lanes[places])

    return run


def _finish(operands: Operands, modifiers: Modifiers, count: int) -> None:
    hinted = modifiers.flag("L2::cache_hint")
    modifiers.finish()
    operands.count(count + hinted)


def _coordinates(operands: Operands, place: int, rank: int) -> tuple[Reader, list[Reader]]:
    """Readers of `[map, {coordinates}]`."""
    operand = operands.given[place]
    if not isinstance(operand, Address) or len(operand.coordinates) != rank:
        raise operands.refused(operand)
    return operands.address(place), [operands.reader_of(coordinate, S32) for coordinate in operand.coordinates]


def _load(operands: Operands, modifiers: Modifiers, rank: int) -> Action:
    _finish(operands, modifiers, 3)
    target, mbarrier, at = operands.address(0), operands.address(2), operands.instruction
    map_address, coordinates = _coordinates(operands, 1, rank)

    def run(team: Team, mask: Mask) -> None:
        places, barriers = (team.chosen(read(team), mask) for read in (target, mbarrier))
        for number, lane, tensor, start in _boxes(team, mask, map_address, coordinates, operands):
            chunks = _chunks(team, int(places[number]), lane, tensor, operands)
            if chunks is None:
                continue
            octets = np.zeros((len(chunks), _CHUNK), U8)
            addresses, inside, nbytes = _elements(tensor, start)
            values = read_global(team, operands, addresses[inside], nbytes, _always(lane))
            words = octets.view(WORDS[nbytes]).reshape(-1)
            words[inside] = values
            team.shared.store(chunks, _CHUNK, octets.view(WORDS[_CHUNK])[:, 0])
            offset = int(barriers[number]) - SHARED_BASE
            team.mbarriers.copy(offset, np.array([lane]), chunks[None], _CHUNK, tensor.box_bytes, at)

    return run


def _store(operands: Operands, modifiers: Modifiers, rank: int) -> Action:
    _finish(operands, modifiers, 2)
    source, at = operands.address(1), operands.instruction
    map_address, coordinates = _coordinates(operands, 0, rank)

    def run(team: Team, mask: Mask) -> None:
        places = team.chosen(source(team), mask)
        for number, lane, tensor, start in _boxes(team, mask, map_address, coordinates, operands):
            chunks = _chunks(team, int(places[number]), lane, tensor, operands)
            if chunks is None:
                continue
            owners = np.full(len(chunks), lane)
            team.shared.shadow.begin_proxy_read(chunks, _CHUNK, owners, at)
            team.bulk_stores.begin(chunks, _CHUNK, owners)
            addresses, inside, nbytes = _elements(tensor, start)
            words = team.shared.load(chunks, _CHUNK).view(WORDS[nbytes])
            write_global(team, operands, addresses[inside], words[inside], nbytes, _always(lane))

    return run


def _boxes(
    team: Team, mask: Mask, map_address: Reader, coordinates: list[Reader], operands: Operands
) -> Iterator[tuple[int, int, TensorMap, tuple[int, ...]]]:
    """Yield for each thread that copies: its number among them, its lane, its map and the start of its box."""
    maps = team.chosen(map_address(team), mask)
    starts = [team.chosen(read(team), mask) for read in coordinates]
    for number, lane in enumerate(team.lanes(mask)):
        tensor = _map_of(team, int(maps[number]), int(lane), operands)
        if tensor is not None and len(tensor.dims) != len(starts):
            _tell(team, f"it has {len(tensor.dims)} dimensions, the copy {len(starts)}", int(lane), operands)
        elif tensor is not None:
            yield number, int(lane), tensor, tuple(int(start[number]) for start in starts)


def _map_of(team: Team, address: int, lane: int, operands: Operands) -> TensorMap | None:
    """The map at an address that the thread may use."""
    problem = team.tensor_maps.problem(address, lane)
    if problem is not None:
        _tell(team, problem, lane, operands)
        return None
    parts = address + np.arange(0, NBYTES, 16)
    words = read_global(team, operands, parts, 16, _always(lane))
    tensor_map = read_map(words.view(U8))
    if isinstance(tensor_map, str):
        _tell(team, tensor_map, lane, operands)
        return None
    return tensor_map


def _always(lane: int) -> Callable[[Indices], Indices]:
    """A choice for accesses that are all of one thread."""
    return lambda places: np.full(len(places), lane)


def _tell(team: Team, detail: str, lane: int, operands: Operands) -> None:
    team.tell(Check.DESCRIPTOR, detail, np.array([lane]), operands.instruction)


def _chunks(team: Team, place: int, lane: int, tensor: TensorMap, operands: Operands) -> Indices | None:
    """Return the places in shared memory of the box's runs of 16 bytes, row by row; None if it does not fit there."""
    if place % 128 and tensor.swizzle_bytes:
        _tell(team, f"the box of a swizzled copy is at {place}, which is not a multiple of 128", lane, operands)
        return None
    addresses = swizzled(place + np.arange(0, tensor.box_bytes, _CHUNK), tensor.swizzle_bytes)
    index, lanes, _ = team.shared.locate(addresses, np.full(len(addresses), lane), _CHUNK, operands.instruction)
    return index if len(lanes) == len(addresses) else None


def _elements(tensor: TensorMap, start: tuple[int, ...]) -> tuple[Indices, Values, int]:
    """The addresses of a box's elements, which of them lie in the tensor, and their size: 16 bytes where that is
    possible, as the box's rows."""
    size = tensor.element_bytes
    columns = start[0] + np.arange(tensor.box[0])
    per_word = _CHUNK // size
    if start[0] * size % _CHUNK == 0 and tensor.dims[0] * size % _CHUNK == 0:
        columns, size = columns[::per_word], _CHUNK
    addresses = columns * tensor.element_bytes
    inside = (columns >= 0) & (columns < tensor.dims[0])
    for dimension in range(1, len(tensor.dims)):
        places = start[dimension] + np.arange(tensor.box[dimension])
        addresses = (places * tensor.strides[dimension - 1])[:, None] + addresses.reshape(1, -1)
        holds = (places >= 0) & (places < tensor.dims[dimension])
        inside = holds[:, None] & inside.reshape(1, -1)
    return tensor.address + addresses.reshape(-1), inside.reshape(-1), size
