"""Independent pieces of work on several threads, none of which divides its own operations.

torch divides every operation among its threads, and all of them meet after it. Calibration runs hundreds of thousands
of operations that take microseconds: on a machine with other work each meeting waits for a time slice. AWQ of a model
of 6 million parameters took 86 processor seconds so, and 9 with one thread.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")
# Each thread holds the intermediate values of a piece of work. On 16 cores and more the pieces divide their operations.
_MOST_WORKERS = 8
# Elements of a weight per chunk: few enough for fp32 intermediates to stay in a core's cache, and enough for an
# operation to take longer than threads wait for Python's lock.
_ELEMENTS = 1 << 18


def parallel_map(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The function's result for each item, in order, computed on torch's number of threads.

    The function must not depend on the order of the calls. The first exception that it raises is raised.
    """
    threads = torch.get_num_threads()
    workers, share = min(threads, len(items), _MOST_WORKERS), max(1, threads // _MOST_WORKERS)
    if workers <= 1:
        with torch_threads(share):
            return [function(item) for item in items]
    is_inference = torch.is_inference_mode_enabled()

    def result(item: T) -> R:
        with torch.inference_mode(is_inference):
            return function(item)

    try:
        with ThreadPoolExecutor(workers, "calibration", torch.set_num_threads, (share,)) as pool:
            return list(pool.map(result, items))
    finally:
        # A worker's count is its own, but it is also what threads begin with that start later.
        torch.set_num_threads(threads)


def row_spans(weight: Tensor, least: int = 1, multiple: int = 1) -> list[slice]:
    """Rows of a weight [rows, columns] for one item each, `least` or more of them and a multiple of `multiple`."""
    step = max(least, _ELEMENTS // weight.shape[1])
    step = -(-step // multiple) * multiple
    return [slice(start, start + step) for start in range(0, len(weight), step)]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch's operations on that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Run small operations on one thread: waking threads for each takes longer, and far longer on a busy machine."""
    return torch_threads(1)
