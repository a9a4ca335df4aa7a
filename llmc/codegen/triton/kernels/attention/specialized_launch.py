"""The launches of specialized_prefill.py: for which attention, and with which tiles."""

from collections.abc import Mapping

from llmc.codegen.call import Call
from llmc.codegen.triton.kernel import Constant, DeviceLaunch
from llmc.codegen.triton.kernels.attention.overlapped_softmax import GROUP_ROWS
from llmc.codegen.triton.kernels.attention.specialized_prefill import specialized_prefill_kernel
from llmc.program.launch_arguments import Argument
from llmc.targets import GpuTarget

_ARCH = 90
# The warps of a group multiply together.
_WARPS = 4
ROW_TILE = 2 * GROUP_ROWS.value
# By the larger dimension of keys and values: keys of a tile, and tiles of a ring. They and the queries fit in shared
# memory. With 256 channels, the sums of more keys would not fit in registers.
_TILES: Mapping[int, tuple[int, int]] = {64: (128, 3), 128: (128, 2), 256: (32, 3)}
# Up to this many channels, FlashAttention-3 lets its groups take turns.
_ALTERNATES_UP_TO = 128
# Options that only paged_prefill_kernel has, as constants and as arguments.
_OTHER_CONSTANTS = ("LATENT", "CHUNK", "PINNED", "RECENT")
_OTHER_ARGUMENTS = ("slopes_ptr", "recent_k_ptr")


def specialized_launches(
    call: Call,
    target: GpuTarget,
    arguments: Mapping[str, Argument],
    constants: Mapping[str, Constant],
    grid: tuple[str, str],
    then: tuple[DeviceLaunch, ...],
) -> tuple[DeviceLaunch, ...]:
    """The launches, the one that is probably faster first; empty if the kernel cannot compute the call.

    arguments, constants: of paged_prefill_kernel. grid: of that kernel with ROW_TILE rows.
    """
    dims, group = (call.shape("q")[1], call.shape("v_cache")[-1]), call.shape("q")[0] // call.shape("k_cache")[-3]
    if target.backend != "cuda" or target.arch != _ARCH or any(dim not in _TILES for dim in dims):
        return ()
    if any(constants[name] for name in _OTHER_CONSTANTS) or any(arguments[n] is not None for n in _OTHER_ARGUMENTS):
        return ()
    if call.plain("cache_format") is not None or call.dtype("q").itemsize != 2:
        return ()
    widest = max(dims)
    key_tile, stages = _TILES[widest]
    if call.dtype("k_cache") is not call.dtype("q") or group > ROW_TILE or key_tile % call.block_size():
        return ()
    names = specialized_prefill_kernel.arg_names
    own = {"KEY_TILE": key_tile, "STAGES": stages, "WARPS": _WARPS}
    alternates = widest <= _ALTERNATES_UP_TO
    return tuple(
        DeviceLaunch(
            specialized_prefill_kernel,
            {name: value for name, value in arguments.items() if name in names},
            {name: value for name, value in constants.items() if name in names} | own | {"ALTERNATE": is_alternating},
            grid,
            num_warps=_WARPS,
            num_stages=stages,
            then=then,
        )
        for is_alternating in (alternates, not alternates)
    )
