"""Seconds of launches, each behind a flushed cache."""

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
    flushed = torch.empty(2 * cache_bytes, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + times)]
    for start, end in events:
        flushed.zero_()
        # Meanwhile the launches are queued, so that their time has no wait for the CPU in it.
        torch.cuda._sleep(_QUEUEING_CYCLES)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events[WARM_UP:]]
