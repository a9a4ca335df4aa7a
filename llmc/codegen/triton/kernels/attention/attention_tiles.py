"""How many query rows and keys a program of paged attention works on at a time, by target and dimensions."""

from dataclasses import dataclass

import triton

from llmc.targets import GpuTarget

# Query heads of a program over latents: one matrix instruction's rows. More do not fit with 512 channels.
_LATENT_HEADS = 16


@dataclass(frozen=True)
class Tile:
    """rows: query rows of a program. keys: cached positions a turn."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def heads_together(group: int, is_latent: bool) -> int:
    """Number of query heads per program, of those that read the same KV head."""
    if not is_latent:
        return group
    return next(count for count in range(min(group, _LATENT_HEADS), 0, -1) if group % count == 0)


def latent_tile(target: GpuTarget, is_fp32: bool) -> Tile:
    """The tile of every program over latents: values of up to 512 channels that are also keys."""
    if is_fp32:
        return Tile(16, 16, 8, 1)
    if target.backend == "hip":
        return Tile(16, 16, 4, 1)
    return Tile(16, 32 if target.has_tma else 16, 8, 2)


def decode_tile(target: GpuTarget, is_fp32: bool, dim: int, group: int, *, is_coded: bool, is_apart: bool) -> Tile:
    """The tile of a decode program: all query heads of a KV head, and at least what a matrix instruction takes.

    is_coded, is_apart: as for prefill_tiles.
    """
    row_tile = max(16, triton.next_power_of_2(group))
    if is_fp32:
        return Tile(row_tile, 32, 8, 2)
    # For sm_100, 64 keys of 128 channels as codes with groups take a few registers more than there are.
    is_short = dim > 128 or row_tile > 32 or (is_coded and dim > 64 and target.arch == 100)
    is_wide = row_tile > 32 or (is_apart and dim > 128 and not target.has_tma)
    return Tile(row_tile, 32 if is_short else 64, 8 if is_wide else 4, 3)


def tree_tile(is_fp32: bool, dim: int, group: int, *, is_apart: bool) -> Tile:
    """The tile of a program for queries of a tree, whose masks take registers. is_apart: as for prefill_tiles."""
    if is_fp32:
        return Tile(16, 16, 4 if dim <= 128 else 8, 1)
    keys = 16 if is_apart and dim > 64 else 32
    return Tile(32 if dim <= 64 else 16, keys, 4 if triton.next_power_of_2(group) <= 32 else 8, 1)


def prefill_tiles(
    target: GpuTarget, is_fp32: bool, dim: int, *, is_padded: bool, is_coded: bool, is_apart: bool = False
) -> tuple[Tile, ...]:
    """Tiles that hold dim columns without spilling on the target, the best first. dim: a power of two up to 256.

    is_padded: some of the columns are masked out, which takes registers. is_coded: keys and values become numbers in
    registers instead of going from the cache to shared memory, which takes more. is_apart: the newest ones are numbers
    in other caches, and two kinds of caches take more registers still.
    """
    if is_fp32:
        return (Tile(16, 32, 4, 1),) if dim <= 128 else (Tile(16, 16, 8, 1),)
    if target.backend == "hip":
        return (Tile(128, 32, 4, 2),) if dim <= 128 else (Tile(64, 16, 4, 1),)
    if target.has_tma:
        if dim <= 64:
            return (Tile(128, 64, 8, 3),) if is_coded else (Tile(128, 64, 8, 3), Tile(128, 64, 4, 3))
        if dim <= 128:
            is_full = is_padded or is_coded
            return (Tile(128, 64, 8, 3),) if is_full else (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3))
        if is_apart:
            return (Tile(32, 32, 8, 2),)
        is_full = is_coded or target.arch == 100
        return (Tile(64, 32, 8, 2),) if is_full else (Tile(128, 32, 8, 2), Tile(64, 64, 8, 2))
    if dim <= 64:
        return (Tile(128, 64, 8, 3),)
    if dim > 128 and is_coded:
        return (Tile(32, 32, 8, 2),)
    if dim > 128 or is_padded or is_apart:
        return (Tile(64, 32, 8, 2),)
    return (Tile(128, 32, 8, 3),) if is_coded else (Tile(128, 32, 8, 3), Tile(64, 32, 4, 3))
