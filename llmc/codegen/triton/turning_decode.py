"""Let the decode launch of attention rotate and write its own tokens' rows, in steps of one token per request.

    rope_kv_write, prefill, decode      in steps with a request of several tokens
    decode that turns and writes        in the others: T = R, where prefill has nothing to do
Must have: the launches follow each other, and nothing else reads the rotated queries. Sites that are alike, as layers
are, change together, because they share their alternatives.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from llmc.codegen.launches import alike, plan_buffers, spans_of
from llmc.codegen.triton.backend import TritonBackend, Unspecialized
from llmc.codegen.triton.kernels.attention.paged_decode import paged_decode_kernel
from llmc.program import Alternative, Launch, Program
from llmc.program.launch_arguments import Operand

_WRITE, _DECODE = "rope_kv_write_kernel", "paged_decode_kernel"
_PREFILLS = ("paged_prefill_kernel", "specialized_prefill_kernel")


@dataclass(frozen=True)
class _Site:
    """The indices of a layer's rotation and decode. The launches between them are prefills."""

    write: int
    decode: int


def turn_in_decodes(program: Program, backend: TritonBackend) -> Program:
    """The program with a launch less per layer in steps of one token per request, and with a new memory plan."""
    kept = {side.buffer for side in program.side_outputs}
    sites = _sites(program.launches, backend, kept)
    if not sites:
        return program
    turning = {site.decode: _turning(program.launches, site, backend) for site in sites}
    changed = {site.write: _unless_all_decode(program.launches[site.write], 0) for site in sites}
    changed |= {site.decode: _unless_all_decode(program.launches[site.decode], 2) for site in sites}
    launches: list[Launch] = []
    places: list[int] = []
    for index, launch in enumerate(program.launches):
        places.append(len(launches))
        launches.append(changed.get(index, launch))
        if index in turning:
            launches.append(turning[index])
    spans, end = spans_of(launches), len(launches) - 1
    unplaced = []
    for buffer in program.buffers:
        first, last = spans[buffer.name]
        unplaced.append(replace(buffer, first_launch=first, last_launch=end if buffer.name in kept else last))
    buffers, plan = plan_buffers(unplaced)
    return replace(
        program,
        launches=tuple(launches),
        buffers=buffers,
        arena=plan.arena,
        unplanned_arena=plan.unplanned,
        alternatives=tuple(_moved(a, places, {site.decode for site in sites}) for a in program.alternatives),
    )


def _sites(launches: Sequence[Launch], backend: TritonBackend, kept: Collection[str | None]) -> list[_Site]:
    """Return the sites where the decode can turn. Sites that are alike are all returned, or none.

    kept: buffers that the step leaves to its caller.
    """
    users: dict[str, list[int]] = defaultdict(list)
    for index, launch in enumerate(launches):
        for value in launch.arguments.values():
            if isinstance(value, Operand) and value.space == "buffer":
                users[value.name].append(index)
    by_kind: dict[Hashable, list[_Site | None]] = defaultdict(list)
    for index, launch in enumerate(launches):
        if launch.family == _DECODE:
            start = index
            while start and launches[start - 1].family in _PREFILLS:
                start -= 1
            site = _Site(start - 1, index)
            is_one = start > 0 and start < index and _turns(launches, site, users, backend, kept)
            by_kind[alike(launches[start : index + 1])].append(site if is_one else None)
    return [site for alikes in by_kind.values() if None not in alikes for site in alikes if site is not None]


def _turns(
    launches: Sequence[Launch],
    site: _Site,
    users: dict[str, list[int]],
    backend: TritonBackend,
    kept: Collection[str | None],
) -> bool:
    """Whether the launch before prefill rotates for this attention only."""
    write, decode = launches[site.write], launches[site.decode]
    if write.family != _WRITE or write.grid[0] != "T":
        return False
    if any((x.only, x.wanted, x.sides, x.unless) != (None, (), (), ()) for x in launches[site.write : site.decode + 1]):
        return False
    rotated = write.arguments["y_ptr"]
    if not isinstance(rotated, Operand) or rotated != decode.arguments["q_ptr"] or rotated.name in kept:
        return False
    if any(write.arguments[name] != decode.arguments[name] for name in ("k_cache_ptr", "v_cache_ptr")):
        return False
    constants, turned = (dict(backend.kernels[x.kernel].constants) for x in (decode, write))
    has_same_rows = all(constants[name] == turned[name] for name in ("KV_HEADS", "HEAD_DIM", "VALUE_DIM", "BLOCK_SIZE"))
    is_read_later = any(index > site.decode for index in users[rotated.name])
    return has_same_rows and constants["CACHE_FORMAT"] == "none" and not constants["LATENT"] and not is_read_later


def _turning(launches: Sequence[Launch], site: _Site, backend: TritonBackend) -> Launch:
    """The decode that turns, in steps of one token per request."""
    write, decode = launches[site.write], launches[site.decode]
    kernel, turned = backend.kernels[decode.kernel], dict(backend.kernels[write.kernel].constants)
    taken = ("k_ptr", "k_row_stride", "v_ptr", "v_row_stride", "cos_ptr", "sin_ptr", "slot_mapping_ptr")
    own = {name: write.arguments[name] for name in ("q_ptr", "q_row_stride", *taken)}
    given = {name: value for name, value in kernel.constants if name not in own}
    constants = given | {"HALF": turned["HALF"], "INTERLEAVED": turned["INTERLEAVED"]}
    name = backend.name_of(
        Unspecialized(
            kernel.function, kernel.module, tuple(sorted(constants.items())), kernel.num_warps, kernel.num_stages
        )
    )
    order = paged_decode_kernel.arg_names
    arguments = decode.arguments | own
    splits, shares, requests = decode.grid
    return replace(
        decode,
        kernel=name,
        arguments={n: arguments[n] for n in order if n in arguments},
        grid=(splits, shares, f"max({requests} - max(T - R, 0) * {requests}, 0)"),
        bytes_moved="0",
        flops="0",
    )


def _unless_all_decode(launch: Launch, axis: int) -> Launch:
    """The launch with an empty grid in steps of one token per request."""
    grid = list(launch.grid)
    grid[axis] = f"min({grid[axis]}, (T - R) * {grid[axis]})"
    return replace(launch, grid=tuple(grid))


def _moved(alternative: Alternative, places: Sequence[int], decodes: set[int]) -> Alternative:
    """The alternative at its launches' new places, its decode changed as theirs is."""
    launches = alternative.launches
    if alternative.last in decodes:
        launches = (*launches[:-1], _unless_all_decode(launches[-1], 2))
    first, last = places[alternative.first], places[alternative.last]
    return replace(
        alternative,
        first=first,
        last=last,
        launches=launches,
        buffers=tuple(replace(b, first_launch=first, last_launch=last) for b in alternative.buffers),
    )
