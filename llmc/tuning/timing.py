"""Seconds of launches, each after a flush of the cache."""

from collections.abc import Callable

LAUNCHES, ROUNDS, WARM_UP = 20, 5, 5
# 0.2 ms of a GPU's clock: several launches are queued in that time.
_QUEUEING_CYCLES = 400_000


def timed(run: Callable[[], None], times: int) -> list[float]:
    """Seconds of each run but the first few, which warm up.

    Its inputs are outside of the L2 cache, as the weights of a layer are when a step reaches them.
    """
    import torch

    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    # Read, not written: lines that were written would be copied to memory during the measured launch.
    flushing = torch.zeros(2 * cache_bytes // 8, dtype=torch.int64, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + times)]
    for start, end in events:
        flushing.amax()
        # Meanwhile the launches are queued, so that their time has no wait for the CPU in it.
        torch.cuda._sleep(_QUEUEING_CYCLES)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events[WARM_UP:]]
